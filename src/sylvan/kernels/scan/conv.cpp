// Causal depthwise convolution: each channel's last K inputs, weighted, oldest first; then the bias, and silu of the rounded sum.
// buf: x, weight [C][K], bias [C] or none, state [slots][K][C] (the last K inputs, oldest first), out, and see scan.h.
// n: C, K, elements from row to row of x, whether silu follows.
#include "scan.h"

namespace {

constexpr int CONV_VECTORS = 4, CONV_COLS = CONV_VECTORS * LANES, CONV_SPANS = 5;

int conv_tiles(const Op& op, const Step&) { return ceil_div(op.n[0], CONV_COLS); }

template <class T> void conv(const Op& op, const Step& s, int t, void* scratch) {
    const int channels = op.n[0], taps = op.n[1], first = t * CONV_COLS, cols = std::min(CONV_COLS, channels - first);
    const T *x = at<T>(op, s, 0) + first, *bias = at<T>(op, s, 2), *weight = at<T>(op, s, 1) + int64_t(first) * taps;
    T *state = at<T>(op, s, 3) + first, *out = at<T>(op, s, 4) + first;
    float *weights = static_cast<float*>(scratch), *ring = weights + taps * CONV_COLS;  // [K][64] each
    std::fill_n(weights, taps * CONV_COLS, 0.f);
    for (int c = 0; c < cols; c++)
        for (int k = 0; k < taps; k++) weights[k * CONV_COLS + c] = scans::number(weight[c * taps + k]);
    vf shift[CONV_VECTORS];
    for (int v = 0; v < CONV_VECTORS; v++) shift[v] = bias ? scans::get(bias + first + v * LANES, cols - v * LANES) : vf{};
    for (int seq = 0; seq < s.run->seqs; seq++) {
        const scans::Span span = scans::span(op, s, seq, CONV_SPANS);
        if (!span.rows) continue;
        for (int k = 0; k < taps; k++)
            for (int v = 0; v < CONV_VECTORS; v++) {
                const T* from = state + (int64_t(span.slot) * taps + k) * channels + v * LANES;
                store(ring + k * CONV_COLS + v * LANES, scans::get(from, cols - v * LANES));
            }
        int oldest = 0;
        scans::walk(op, s, span, CONV_SPANS, [&](int row) {
            const T* in = x + int64_t(row) * op.n[2];
            T* to = out + int64_t(row) * channels;
            for (int v = 0; v * LANES < cols; v++) {
                store(ring + oldest * CONV_COLS + v * LANES, scans::get(in + v * LANES, cols - v * LANES));
                vf total{};
                for (int k = 0, at = oldest; k < taps; k++) {
                    at = at + 1 == taps ? 0 : at + 1;
                    total = fma(load<vf>(ring + at * CONV_COLS + v * LANES), load<vf>(weights + k * CONV_COLS + v * LANES), total);
                }
                total += shift[v];
                if (op.n[3]) {
                    T rounded[LANES];
                    put(rounded, total);
                    vf y = get(rounded);
                    total = y * sigmoid(y);
                }
                scans::put(to + v * LANES, total, cols - v * LANES);
            }
            oldest = oldest + 1 == taps ? 0 : oldest + 1;
        }, [&](int slot) {
            for (int k = 0, at = oldest; k < taps; k++, at = at + 1 == taps ? 0 : at + 1)
                for (int v = 0; v * LANES < cols; v++) {
                    T* to = state + (int64_t(slot) * taps + k) * channels + v * LANES;
                    scans::put(to, load<vf>(ring + at * CONV_COLS + v * LANES), cols - v * LANES);
                }
        });
    }
}

}  // namespace

const Kernel short_conv_kernel[2] = {{conv_tiles, conv<bf16>}, {conv_tiles, conv<float>}};
