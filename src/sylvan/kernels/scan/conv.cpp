// Causal depthwise convolution: each channel's last K inputs, weighted, oldest first; then the
// bias, and silu of the rounded sum. States hold the last K inputs, oldest first. Gated inputs are
// products, and so are gated outputs.
#include "scan.h"

namespace {

constexpr int CONV_VECTORS = 4, CONV_COLS = CONV_VECTORS * LANES;

int conv_tiles(const ShortConv& op, const Step&) { return ceil_div(op.channels, CONV_COLS); }

// The product of an input and its factor, 2 `channels` before it; p is at the factor.
template <class T> vf gated_input(const T* p, int channels, int n) {
    return scans::rounded<T>(scans::get(p, n) * scans::get(p + 2 * channels, n));
}

template <class T> void conv(const ShortConv& op, const Step& s, int t, void* scratch) {
    const int channels = op.channels, taps = op.taps, first = t * CONV_COLS;
    const int cols = std::min(CONV_COLS, channels - first);
    const T* x = at<T>(op.x, s) + op.x_first + first;
    const float *bias = at(op.bias, s),
                *weight = at(op.weight, s) + int64_t(first) * op.weight_stride;
    T *state = at<T>(op.state, s) + first, *out = at<T>(op.out, s) + first;
    // [K][64] each
    float *weights = static_cast<float*>(scratch), *ring = weights + taps * CONV_COLS;
    std::fill_n(weights, taps * CONV_COLS, 0.f);
    for (int c = 0; c < cols; c++)
        for (int k = 0; k < taps; k++)
            weights[k * CONV_COLS + c] = weight[c * op.weight_stride + k];
    // the last tile pads rows with zeros
    const int padded = first + cols == channels ? op.out_stride - first : cols;
    vf shift[CONV_VECTORS];
    for (int v = 0; v < CONV_VECTORS; v++)
        shift[v] = bias ? scans::get(bias + first + v * LANES, cols - v * LANES) : vf{};
    for (int seq = 0; seq < s.run->seqs; seq++) {
        const scans::Span span = scans::span(*s.run, seq);
        if (!span.rows) continue;
        for (int k = 0; k < taps; k++)
            for (int v = 0; v < CONV_VECTORS; v++) {
                const T* from = state + (int64_t(span.slot) * taps + k) * channels + v * LANES;
                store(ring + k * CONV_COLS + v * LANES, scans::get(from, cols - v * LANES));
            }
        int oldest = 0;
        scans::walk(
            *s.run, span,
            [&](int row) {
                const T* in = x + int64_t(row) * op.x_stride;
                T* to = out + int64_t(row) * op.out_stride;
                for (int v = 0; v * LANES < cols; v++) {
                    const int left = cols - v * LANES;
                    store(ring + oldest * CONV_COLS + v * LANES,
                          op.gated ? gated_input(in + v * LANES, channels, left)
                                   : scans::get(in + v * LANES, left));
                    vf total{};
                    for (int k = 0, at = oldest; k < taps; k++) {
                        at = at + 1 == taps ? 0 : at + 1;
                        total = fma(load<vf>(ring + at * CONV_COLS + v * LANES),
                                    load<vf>(weights + k * CONV_COLS + v * LANES), total);
                    }
                    total += shift[v];
                    if (op.silu) {
                        vf y = scans::rounded<T>(total);
                        total = y * sigmoid(y);
                    }
                    if (op.gated)
                        total =
                            scans::rounded<T>(total) * scans::get(in + channels + v * LANES, left);
                    scans::put(to + v * LANES, total, left);
                }
                for (int i = cols; i < padded; i++) to[i] = 0;
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
