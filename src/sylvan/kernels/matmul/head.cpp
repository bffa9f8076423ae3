#include "head.h"
#include "tiling.h"

namespace {

// A unit consists of whole tiles and has at most one block of statistics.
static_assert(STATS_BLOCK % (WIDEST * LANES) == 0);

// The op as a linear layer, if it computes float32 rows of all outputs; else null.
const Linear* as_product(const Op& op) {
    if (op.kind != LINEAR && op.kind != LINEAR_INT8 && op.kind != LINEAR_INT4 &&
        op.kind != LINEAR_CODED)
        return nullptr;
    auto& linear = static_cast<const Linear&>(op);
    bool whole = op.rows == OUTPUTS && op.times <= 1 && !linear.groups.present();
    return whole && (linear.out_f32 || op.dtype == F32_ROWS) ? &linear : nullptr;
}

// Whether an op after the head can be skipped in this step, because no request has a LoRA adapter
// that changes the head.
bool adds_nothing(const Op& op, const Step& s) {
    const Kernel* kernel = op.kind == LORA_SHRINK   ? lora_shrink_kernel
                           : op.kind == LORA_EXPAND ? lora_expand_kernel
                                                    : nullptr;
    return kernel && !kernel[op.dtype].tiles(op, s);
}

}  // namespace

void Head::begin(const std::vector<OpRecord>& ops, Step& s, std::vector<void*>& buf) {
    head = nullptr;
    const Sample* sample = s.run->sample;
    if (!sample) return;
    auto end = ops.size();
    while (end && adds_nothing(ops[end - 1].op(), s)) end--;
    if (!end) return;
    const Linear* last = as_product(ops[end - 1].op());
    if (!last || at<float>(last->out, s) != sample->logits) return;
    if (sample->rows != s.run->outputs || sample->vocab > last->outputs ||
        !collector.begin(*sample, s.threads))
        return;
    head = last;
    if (!shared) shared = int(buf.size());
    if (int(buf.size()) < shared + s.threads) buf.resize(shared + s.threads);
    s.buf = buf.data();
    outs = buf.data() + shared;
    // ---- adjacent tiles form a unit, unless that leaves too few units for the threads
    int step = linear_width(*head, s) * LANES;
    int most = collector.wants_stats() ? STATS_BLOCK : head->outputs / (8 * s.threads);
    width = std::max(1, std::min(STATS_BLOCK, most) / step) * step;
    unit_floats = int64_t(std::min(linear_rows(*head), s.run->outputs)) * width;
    if (int64_t(tiles.size()) < unit_floats * s.threads) tiles.resize(unit_floats * s.threads);
}

int Head::units(const Step& s) const {
    return ceil_div(head->outputs, width) * ceil_div(s.run->outputs, linear_rows(*head));
}

void Head::unit(const Kernel& kernel, const Step& s, int u, void* scratch, int thread) {
    int across = ceil_div(head->outputs, width), high = linear_rows(*head);
    int step = linear_width(*head, s) * LANES;
    int first = u % across * width, cols = std::min(width, head->outputs - first);
    int m0 = u / across * high, m1 = std::min(m0 + high, s.run->outputs);
    float *mine = tiles.data() + unit_floats * thread, *logits = s.run->sample->logits;
    outs[thread] = mine - (int64_t(m0) * cols + first);  // address that row 0, column 0 would have
    LinearCoded op{};                                    // large enough for every kind of linear op
    if (head->kind == LINEAR_CODED)
        op = static_cast<const LinearCoded&>(*head);
    else
        static_cast<Linear&>(op) = *head;
    op.out.index = shared + thread;
    op.out_stride = cols;
    int t = u / across * ceil_div(head->outputs, step) + first / step;
    for (int n = 0; n < cols; n += step, t++) kernel.tile(op, s, t, scratch);
    for (int r = m0; r < m1; r++, mine += cols) {
        if (collector.writes(r))
            memcpy(logits + r * int64_t(head->out_stride) + first, mine, cols * sizeof(float));
        collector.take(r, mine, first, cols, thread);
    }
}
