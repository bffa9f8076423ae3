// The interpreter: every thread walks the op list, with a barrier before ops that must wait; within
// one op, threads claim tiles.
#include "../matmul/head.h"
#include "kernel.h"
#include "pool.h"
#include "../sample/sample.h"
#include <chrono>

namespace {

#define SYLVAN_ENTRY(name) name##_kernel,
const Kernel* const kernels[N_KINDS] = {SYLVAN_OPS(SYLVAN_ENTRY)};
#undef SYLVAN_ENTRY

struct Program {
    Program(const OpRecord* ops, int n_ops, void* const* buf, int n_buf)
        : ops(ops, ops + n_ops), buf(buf, buf + n_buf), next(n_ops) {}

    std::vector<OpRecord> ops;
    std::vector<void*> buf;
    std::vector<int> groups;               // query heads per KV head, of the attention ops
    std::vector<std::vector<Item>> items;  // by group size
    std::vector<Work> work;
    std::vector<std::atomic<int>> next;  // per op: the next unclaimed tile
    std::atomic<int> next_sample{0};
    Step step{};
    int text_page = 0;  // tokens of a page of texts that attend both ways; 0: there are none
    std::vector<int32_t> text_slots, first_pages, text_pages;
    Head head;
    Pool* pool = &Pool::shared();  // that runs it
};

void prepare(const Inputs& in, Run& run) {
    const int32_t *slots = in.numbers, *starts = slots + in.seqs, *stops = starts + in.seqs;
    const int32_t* sampled = stops + in.seqs;
    const int32_t *rows = sampled + in.outputs, *from = rows + in.in_flight;
    const int32_t* given = from + in.in_flight;
    // the caller's buffers
    auto filled = [](const int32_t* array) { return const_cast<int32_t*>(array); };
    run.tokens = in.tokens;
    run.outputs = in.outputs;
    run.seqs = in.seqs;
    int32_t *ids = filled(run.ids), *positions = filled(run.positions);
    int32_t* row_start = filled(run.row_start);
    std::copy_n(given, in.tokens, ids);
    for (int i = 0; i < in.in_flight; i++) ids[rows[i]] = in.last_token[from[i]];
    // out-of-vocabulary ids: clamp, so only that request fails
    for (int i = 0; i < in.tokens; i++) ids[i] = std::clamp(ids[i], 0, in.vocab - 1);
    std::copy_n(slots, in.seqs, filled(run.table_row));
    std::copy_n(stops, in.seqs, filled(run.kv_len));
    int row = 0;
    for (int s = 0; s < in.seqs; s++) {
        row_start[s] = row;
        for (int t = starts[s]; t < stops[s]; t++, row++) positions[row] = t + in.shifts[slots[s]];
    }
    row_start[in.seqs] = row;
    for (int g = 0; g < std::max(1, run.groups); g++)
        for (int s = 0; s < in.seqs; s++) {
            const int32_t* pages =
                run.page_table + g * run.table_step + int64_t(slots[s]) * run.table_stride;
            int32_t* place = filled(run.slots) + int64_t(g) * run.slot_step + row_start[s];
            for (int t = starts[s]; t < stops[s]; t++)
                *place++ = pages[t / in.page_size] * in.page_size + t % in.page_size;
        }
    for (int i = 0, n; i < in.outputs; i += n) {  // a request's sampled rows are its last rows
        n = 1;
        while (i + n < in.outputs && sampled[i + n] == sampled[i]) n++;
        for (int k = 0; k < n; k++) filled(run.out_rows)[i + k] = row_start[sampled[i] + 1] - n + k;
    }
    if (!run.sample) return;
    run.sample->rows = in.outputs;
    for (int i = 0; i < in.outputs; i++) {
        int slot = slots[sampled[i]];
        filled(run.sample->slots)[i] = slot;
        // in the text
        filled(run.sample->positions)[i] = positions[run.out_rows[i]] - in.shifts[slot] + 1;
    }
}

// the attention work of a step, shared by all layers
void plan(Program& p, const Run& run, int threads) {
    int longest = 0;
    for (int s = 0; s < run.seqs; s++)
        if (run.row_start[s + 1] > run.row_start[s]) longest = std::max(longest, run.kv_len[s]);
    int chunks = ceil_div(longest, KV_CHUNK);
    for (size_t g = 0; g < p.groups.size(); g++) {
        auto& items = p.items[g];
        auto cut = [&](int tile) {
            items.clear();
            for (int s = run.seqs - 1; s >= 0; s--) {
                int n = (run.row_start[s + 1] - run.row_start[s]) * p.groups[g];
                for (int v = (ceil_div(n, tile) - 1) * tile; v >= 0; v -= tile)  // long ones first
                    items.push_back({s, v, std::min(tile, n - v)});
            }
        };
        cut(QUERY_TILE);
        bool split = chunks > 1 && int(items.size()) < 4 * threads;
        if (split && QUERY_TILE > SPLIT_TILE) cut(SPLIT_TILE);
        p.work[g] = {items.data(), int(items.size()), chunks, split};
    }
}

// each text begins at a new page; all layers use the same pages
Texts place_texts(Program& p, const Run& run) {
    if (!p.text_page) return {};
    p.text_slots.resize(run.tokens);
    p.first_pages.resize(run.seqs);
    int page = 0;
    for (int s = 0; s < run.seqs; s++) {
        int start = run.row_start[s], rows = run.row_start[s + 1] - start;
        p.first_pages[s] = page;
        for (int i = 0; i < rows; i++) p.text_slots[start + i] = page * p.text_page + i;
        page += ceil_div(rows, p.text_page);
    }
    for (int known = int(p.text_pages.size()); known < page; known++) p.text_pages.push_back(known);
    return {p.text_slots.data(), p.first_pages.data(), p.text_pages.data()};
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void walk(void* arg, int thread) {
    Program& p = *static_cast<Program*>(arg);
    Pool& pool = *p.pool;
    void* scratch = pool.scratch(thread);
    int64_t* profile = thread == 0 ? p.step.run->profile : nullptr;
    bool running = false;  // whether tiles since the last barrier may still run
    for (size_t i = 0; i < p.ops.size(); i++) {
        int64_t start = profile ? now() : 0;
        const Op& op = p.ops[i].op();
        const Kernel& kernel = kernels[op.kind][op.dtype];
        if (running && op.waits) {
            pool.barrier();
            running = false;
        }
        bool is_head = p.head.is(op);
        int tiles = is_head ? p.head.units(p.step) : kernel.tiles(op, p.step);
        auto run = [&](int t) {
            is_head ? p.head.unit(kernel, p.step, t, scratch, thread)
                    : kernel.tile(op, p.step, t, scratch);
        };
        if (p.step.threads == 1)
            for (int t = 0; t < tiles; t++) run(t);
        else if (tiles) {
            for (int t; (t = p.next[i].fetch_add(1, std::memory_order_relaxed)) < tiles;) run(t);
            running = true;
        }
        if (profile) profile[i] += now() - start;
    }
    if (running) pool.barrier();
    if (p.step.run->sample) sample_rows(*p.step.run->sample, p.next_sample, p.head.collected());
}

}  // namespace

SYLVAN_API int sylvan_size(int what) {
    const size_t sizes[] = {sizeof(OpRecord),    sizeof(Run),       sizeof(Inputs),
                            sizeof(SampleSlots), sizeof(Sample),    sizeof(ForcedTokens),
                            sizeof(PagedBytes),  sizeof(PackedRows)};
    return int(sizes[what]);
}  // checked when the library is loaded

SYLVAN_API int sylvan_constant(int what) {
    const int values[] = {KV_CHUNK, QUERY_TILE, ROW_PAD, MAX_HEAD, MAX_EXPERTS, MAX_CHOSEN};
    return values[what];
}

// Digest of the ops and their operands: it must equal the digest of the caller.
SYLVAN_API const char* sylvan_ops_digest() { return SYLVAN_OPS_DIGEST; }

SYLVAN_API void sylvan_threads(int n) { Pool::shared().resize(n); }

// Sets the threads of background programs; they inherit the priority of the calling thread.
SYLVAN_API void sylvan_background_threads(int n) { Pool::background().resize(n); }

// Moves a program to the background threads: neither it nor the steps wait for each other. Such a
// program cannot sample.
SYLVAN_API void sylvan_run_in_background(void* program) {
    static_cast<Program*>(program)->pool = &Pool::background();
}

SYLVAN_API void* sylvan_program_new(const OpRecord* ops, int n_ops, void* const* buf, int n_buf) {
    auto* p = new Program(ops, n_ops, buf, n_buf);
    for (OpRecord& record : p->ops) {
        if (record.op().kind != ATTENTION && record.op().kind != ATTENTION_MERGE) continue;
        auto& op = static_cast<Attention&>(record.op());
        if (op.kv.whole_text) p->text_page = op.kv.page_size;
        int group = op.kv.num_heads / op.kv.num_kv_heads;
        auto found = std::find(p->groups.begin(), p->groups.end(), group);
        op.work = int(found - p->groups.begin());
        if (found == p->groups.end()) p->groups.push_back(group);
    }
    p->items.resize(p->groups.size());
    p->work.resize(p->groups.size());
    return p;
}

// Sets entry `index` of the buffer table to `memory`; not while the program runs.
SYLVAN_API void sylvan_program_bind(void* program, int index, void* memory) {
    static_cast<Program*>(program)->buf[index] = memory;
}

SYLVAN_API void sylvan_program_free(void* program) { delete static_cast<Program*>(program); }

// The caller guarantees that the buffers hold run->tokens and run->outputs rows. Returns the number
// of sampled rows without a valid token.
SYLVAN_API int sylvan_program_run(void* program, Run* run) {
    Program& p = *static_cast<Program*>(program);
    if (run->inputs) prepare(*run->inputs, *run);
    Pool& pool = *p.pool;
    std::lock_guard lock(pool.busy);
    plan(p, *run, pool.size());
    for (auto& n : p.next) n.store(0, std::memory_order_relaxed);
    p.next_sample.store(0, std::memory_order_relaxed);
    p.step = {run, p.buf.data(), p.work.data(), pool.size(), place_texts(p, *run)};
    p.head.begin(p.ops, p.step, p.buf);
    pool.run(walk, &p);
    if (!run->sample) return 0;
    const Sample& sample = *run->sample;
    if (run->inputs)
        for (int i = 0; i < sample.rows; i++)
            run->inputs->last_token[sample.slots[i]] = sample.ids[i];
    return count_failed(sample);
}
