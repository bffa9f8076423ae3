#include "head.h"
#include "tiling.h"

namespace {

static_assert(PIECE % (WIDEST * LANES) == 0);  // units are whole tiles, and no more than a piece

bool is_product(const Op& op) {
    bool linear = op.kind == LINEAR || op.kind == LINEAR_INT8 || op.kind == LINEAR_INT4;
    return linear && op.count == OUTPUTS && op.times <= 1 && op.buf[GROUPS] < 0 && (op.n[2] || op.type == F32_ROWS);
}

}  // namespace

void Head::begin(const std::vector<Op>& ops, Step& s, std::vector<void*>& buf) {
    head = nullptr;
    const Sample* sample = s.run->sample;
    if (!sample || ops.empty() || !is_product(ops.back()) || s.buf[ops.back().buf[OUT]] != sample->logits) return;
    if (sample->rows != s.run->outputs || sample->vocab > ops.back().n[1] || !gather.begin(*sample, s.threads)) return;
    head = &ops.back();
    if (!shared) shared = int(buf.size());
    if (int(buf.size()) < shared + s.threads) buf.resize(shared + s.threads);
    s.buf = buf.data(), outs = buf.data() + shared;
    // ---- tiles side by side are looked at together, unless threads would then have too little to share
    int step = linear_width(*head, s) * LANES, most = gather.surveys() ? PIECE : head->n[1] / (8 * s.threads);
    width = std::max(1, std::min(PIECE, most) / step) * step;
    room = int64_t(std::min(linear_rows(*head), s.run->outputs)) * width;
    if (int64_t(tiles.size()) < room * s.threads) tiles.resize(room * s.threads);
}

int Head::units(const Step& s) const { return ceil_div(head->n[1], width) * ceil_div(s.run->outputs, linear_rows(*head)); }

void Head::unit(const Kernel& kernel, const Step& s, int u, void* scratch, int thread) {
    int across = ceil_div(head->n[1], width), high = linear_rows(*head), step = linear_width(*head, s) * LANES;
    int first = u % across * width, cols = std::min(width, head->n[1] - first);
    int m0 = u / across * high, m1 = std::min(m0 + high, s.run->outputs);
    float *mine = tiles.data() + room * thread, *logits = s.run->sample->logits;
    outs[thread] = mine - (int64_t(m0) * cols + first);  // where row 0 and column 0 would be
    Op op = *head;
    op.buf[OUT] = shared + thread, op.n[7] = cols;
    int t = u / across * ceil_div(head->n[1], step) + first / step;
    for (int n = 0; n < cols; n += step, t++) kernel.tile(op, s, t, scratch);
    for (int r = m0; r < m1; r++, mine += cols) {
        if (gather.writes(r)) memcpy(logits + r * int64_t(head->n[7]) + first, mine, cols * sizeof(float));
        gather.take(r, mine, first, cols, thread);
    }
}
