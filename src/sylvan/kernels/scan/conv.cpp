// Causal depthwise convolution: each channel's last K inputs, weighted, oldest first; then the
// bias, and silu of the rounded sum. States hold the last K inputs, oldest first.
#include "scan.h"

namespace {

constexpr int CONV_VECTORS = 4, CONV_COLS = CONV_VECTORS * LANES;

int conv_tiles(const ShortConv& op, const Step&) { return ceil_div(op.channels, CONV_COLS); }

template <class T> void conv(const ShortConv& op, const Step& s, int t, void* scratch) {
    const int channels = op.channels, taps = op.taps, first = t * CONV_COLS;
    const int cols = std::min(CONV_COLS, channels - first);
    const T *x = at<T>(op.x, s) + first, *bias = at<T>(op.bias, s);
    const T* weight = at<T>(op.weight, s) + int64_t(first) * taps;
    T *state = at<T>(op.state, s) + first, *out = at<T>(op.out, s) + first;
    // [K][64] each
    float *weights = static_cast<float*>(scratch), *ring = weights + taps * CONV_COLS;
    std::fill_n(weights, taps * CONV_COLS, 0.f);
    for (int c = 0; c < cols; c++)
        for (int k = 0; k < taps; k++)
            weights[k * CONV_COLS + c] = scans::number(weight[c * taps + k]);
    vf shift[CONV_VECTORS];
    for (int v = 0; v < CONV_VECTORS; v++)
        shift[v] = bias ? scans::get(bias + first + v * LANES, cols - v * LANES) : vf{};
    for (int seq = 0; seq < s.run->seqs; seq++) {
        const scans::Span span = scans::span(op.slots, s, seq);
        if (!span.rows) continue;
        for (int k = 0; k < taps; k++)
            for (int v = 0; v < CONV_VECTORS; v++) {
                const T* from = state + (int64_t(span.slot) * taps + k) * channels + v * LANES;
                store(ring + k * CONV_COLS + v * LANES, scans::get(from, cols - v * LANES));
            }
        int oldest = 0;
        scans::walk(
            op.slots, s, span,
            [&](int row) {
                const T* in = x + int64_t(row) * op.x_stride;
                T* to = out + int64_t(row) * channels;
                for (int v = 0; v * LANES < cols; v++) {
                    store(ring + oldest * CONV_COLS + v * LANES,
                          scans::get(in + v * LANES, cols - v * LANES));
                    vf total{};
                    for (int k = 0, at = oldest; k < taps; k++) {
                        at = at + 1 == taps ? 0 : at + 1;
                        total = fma(load<vf>(ring + at * CONV_COLS + v * LANES),
                                    load<vf>(weights + k * CONV_COLS + v * LANES), total);
                    }
                    total += shift[v];
                    if (op.silu) {
                        T rounded[LANES];
                        put(rounded, total);
                        vf y = get(rounded);
                        total = y * sigmoid(y);
                    }
                    scans::put(to + v * LANES, total, cols - v * LANES);
                }
                oldest = oldest + 1 == taps ? 0 : oldest + 1;
            },
            [&](int slot) {
                for (int k = 0, at = oldest; k < taps; k++, at = at + 1 == taps ? 0 : at + 1)
                    for (int v = 0; v * LANES < cols; v++) {
                        T* to = state + (int64_t(slot) * taps + k) * channels + v * LANES;
                        scans::put(to, load<vf>(ring + at * CONV_COLS + v * LANES),
                                   cols - v * LANES);
                    }
            });
    }
}

}  // namespace

const Kernel short_conv_kernel[2] = {tiled<conv_tiles, conv<bf16>>, tiled<conv_tiles, conv<float>>};
