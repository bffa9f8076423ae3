#include "head.h"
#include "../sample/sample.h"
#include "tiling.h"
#include <cmath>

namespace {

// Any thread may bring columns in any order: equals go to the lower id. What is no number is never larger.
void keep_larger(Best& place, const float* x, int first, int cols, int vocab) {
    std::atomic_ref<Best> best(place);
    Best old = best.load(std::memory_order_relaxed);
    vi better{};
    for (int i = 0; i < cols; i += LANES) better |= load<vf>(x + i) >= splat(old.value);
    if (!any(better)) return;
    Best mine{-INFINITY, NO_LOGIT};
    for (int i = 0, n = std::min(cols, vocab - first); i < n; i++)
        if (x[i] > mine.value) mine = {x[i], first + i};
    while (mine.value > old.value || (mine.value == old.value && mine.id < old.id))
        if (best.compare_exchange_weak(old, mine, std::memory_order_relaxed)) return;
}

bool is_product(const Op& op) {
    bool linear = op.kind == LINEAR || op.kind == LINEAR_INT8 || op.kind == LINEAR_INT4;
    return linear && op.count == OUTPUTS && op.times <= 1 && op.buf[GROUPS] < 0 && (op.n[2] || op.type == F32_ROWS);
}

}  // namespace

void Head::begin(const std::vector<Op>& ops, Step& s, std::vector<void*>& buf) {
    head = nullptr;
    const Sample* sample = s.run->sample;
    if (!sample || ops.empty() || !is_product(ops.back()) || s.buf[ops.back().buf[OUT]] != sample->logits) return;
    const Op& op = ops.back();
    rows.assign(s.run->outputs, {-INFINITY, WHOLE_ROW});
    bool any = false;
    for (int r = 0; r < sample->rows; r++)
        if (wants_largest(*sample, r)) rows[r].id = NO_LOGIT, any = true;
    if (!any) return;
    head = &op;
    if (!shared) shared = int(buf.size());
    if (int(buf.size()) < shared + s.threads) buf.resize(shared + s.threads);
    s.buf = buf.data(), outs = buf.data() + shared;
    room = int64_t(std::min(linear_rows(op), s.run->outputs)) * linear_width(op, s) * LANES;
    if (int64_t(tiles.size()) < room * s.threads) tiles.resize(room * s.threads);
}

void Head::tile(const Kernel& kernel, const Step& s, int t, void* scratch, int thread) {
    Block b = linear_block(*head, s, t);
    int first = b.n0 * LANES, cols = (b.n1 - b.n0) * LANES;
    float *mine = tiles.data() + room * thread, *logits = s.run->sample->logits;
    outs[thread] = mine - (int64_t(b.m0) * cols + first);  // where row 0 and column 0 would be
    Op op = *head;
    op.buf[OUT] = shared + thread, op.n[7] = cols;
    kernel.tile(op, s, t, scratch);
    for (int r = b.m0; r < b.m1; r++, mine += cols) {
        if (rows[r].id == WHOLE_ROW) memcpy(logits + r * int64_t(head->n[7]) + first, mine, cols * sizeof(float));
        else keep_larger(rows[r], mine, first, cols, s.run->sample->vocab);
    }
}
