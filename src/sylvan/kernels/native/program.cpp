// The interpreter: every thread walks the op list; between ops there is a barrier, within one op threads claim tiles.
#include "kernel.h"
#include "pool.h"
#include <chrono>

namespace {

const Kernel* const kernels[N_KINDS] = {
    embed_kernel, rms_norm_kernel, layer_norm_kernel, quantise_kernel, linear_kernel, linear_int8_kernel,
    linear_int4_kernel, glu_kernel, activation_kernel, rope_store_kernel, attention_kernel, attention_merge_kernel,
    take_rows_kernel, add_kernel, scale_kernel, softcap_kernel, cast_kernel,
};

struct Program {
    std::vector<Op> ops;
    std::vector<void*> buf;
    std::vector<int> groups;               // query heads per KV head, of the attention ops
    std::vector<std::vector<Item>> items;  // by group
    std::vector<Work> work;
    std::vector<std::atomic<int>> next;    // per op: the next tile nobody has taken
    Step step;
};

void plan(Program& p, const Run& run, int threads) {  // the attention work of a step, shared by all layers
    int longest = 0;
    for (int s = 0; s < run.seqs; s++)
        if (run.row_start[s + 1] > run.row_start[s]) longest = std::max(longest, run.kv_len[s]);
    int chunks = ceil_div(longest, KV_CHUNK);
    for (size_t g = 0; g < p.groups.size(); g++) {
        auto& items = p.items[g];
        items.clear();
        for (int s = run.seqs - 1; s >= 0; s--) {
            int n = (run.row_start[s + 1] - run.row_start[s]) * p.groups[g];
            for (int v = (ceil_div(n, QUERY_TILE) - 1) * QUERY_TILE; v >= 0; v -= QUERY_TILE)  // long ones first
                items.push_back({s, v, std::min(QUERY_TILE, n - v)});
        }
        int count = int(items.size());
        p.work[g] = {items.data(), count, chunks, chunks > 1 && count < 4 * threads};
    }
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void walk(void* arg, int thread) {
    Program& p = *static_cast<Program*>(arg);
    Pool& pool = Pool::shared();
    void* scratch = pool.scratch(thread);
    int64_t* profile = thread == 0 ? p.step.run->profile : nullptr;
    for (size_t i = 0; i < p.ops.size(); i++) {
        int64_t start = profile ? now() : 0;
        const Op& op = p.ops[i];
        const Kernel& kernel = kernels[op.kind][op.type];
        int tiles = kernel.tiles(op, p.step);
        if (p.step.threads == 1)
            for (int t = 0; t < tiles; t++) kernel.tile(op, p.step, t, scratch);
        else if (tiles) {
            for (int t; (t = p.next[i].fetch_add(1, std::memory_order_relaxed)) < tiles;) kernel.tile(op, p.step, t, scratch);
            pool.barrier();
        }
        if (profile) profile[i] += now() - start;
    }
}

}  // namespace

SYLVAN_API int sylvan_size(int what) { return what == 0 ? sizeof(Op) : sizeof(Run); }  // checked by binding.py at load

SYLVAN_API int sylvan_constant(int what) {
    const int values[] = {KV_CHUNK, QUERY_TILE, ROW_PAD, MAX_HEAD, N_KINDS};
    return values[what];
}

SYLVAN_API void sylvan_threads(int n) { Pool::shared().resize(n); }

SYLVAN_API void* sylvan_program_new(const Op* ops, int n_ops, void* const* buf, int n_buf) {
    auto* p = new Program{{ops, ops + n_ops}, {buf, buf + n_buf}, {}, {}, {}, std::vector<std::atomic<int>>(n_ops), {}};
    for (Op& op : p->ops) {
        if (op.kind != ATTENTION && op.kind != ATTENTION_MERGE) continue;
        int group = op.n[0] / op.n[1];
        auto found = std::find(p->groups.begin(), p->groups.end(), group);
        op.n[11] = int(found - p->groups.begin());
        if (found == p->groups.end()) p->groups.push_back(group);
    }
    p->items.resize(p->groups.size());
    p->work.resize(p->groups.size());
    return p;
}

SYLVAN_API void sylvan_program_free(void* program) { delete static_cast<Program*>(program); }

// The caller vouches that the buffers hold run->tokens and run->outputs rows.
SYLVAN_API void sylvan_program_run(void* program, const Run* run) {
    Program& p = *static_cast<Program*>(program);
    Pool& pool = Pool::shared();
    std::lock_guard lock(pool.busy);
    plan(p, *run, pool.size());
    for (auto& n : p.next) n.store(0, std::memory_order_relaxed);
    p.step = {run, p.buf.data(), p.work.data(), pool.size()};
    pool.run(walk, &p);
}
