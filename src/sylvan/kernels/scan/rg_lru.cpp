// Real-gated linear recurrent unit (Griffin): one gate of the row decays each channel, another
// scales the input. Gates are products with a block-diagonal matrix.
#include "scan.h"

namespace {

constexpr float RG_LRU_SHARPNESS = 8;

int rg_lru_tiles(const RgLruScan& op, const Step& s) { return s.run->seqs * op.num_blocks; }

// The gate of a block: sigmoids of its columns times a matrix, rounded as rows are.
template <class T>
void block_gate(const float* x, const float* weight, const float* bias, int width, float* out) {
    for (int i = 0; i < width; i += LANES) {
        const int left = width - i;
        vf total{};
        for (int k = 0; k < width; k++)
            total = fma(splat(x[k]), scans::get(weight + int64_t(k) * width + i, left), total);
        total = scans::rounded<T>(scans::rounded<T>(total) + scans::get(bias + i, left));
        store(out + i, scans::rounded<T>(sigmoid(total)));
    }
}

template <class T> void rg_lru(const RgLruScan& op, const Step& s, int t, void* scratch) {
    const int width = op.width, block = t % op.num_blocks, first = block * width;
    const int cols = width * op.num_blocks, wide = round_up(width, LANES);
    const scans::Span span = scans::span(*s.run, t / op.num_blocks);
    if (!span.rows) return;
    float *states = at(op.state, s) + first, *held = static_cast<float*>(scratch);
    float *x = held + wide, *opened = x + wide, *kept = opened + wide;
    scans::widen(states + int64_t(span.slot) * cols, held, width);
    const bool last = block == op.num_blocks - 1;
    scans::walk(
        *s.run, span,
        [&](int row) {
            const int64_t place = int64_t(row) * stride(cols) + first;
            scans::widen(at<T>(op.x, s) + place, x, width);
            block_gate<T>(x, at(op.input_weight, s) + int64_t(block) * op.weight_stride,
                          at(op.input_bias, s) + int64_t(block) * op.bias_stride, width, opened);
            block_gate<T>(x, at(op.keep_weight, s) + int64_t(block) * op.weight_stride,
                          at(op.keep_bias, s) + int64_t(block) * op.bias_stride, width, kept);
            const bool begins = s.run->positions[row] == 0;
            T* out = at<T>(op.out, s) + place;
            for (int i = 0; i < width; i += LANES) {
                const int left = width - i;
                const vf sharp = scans::softplus(scans::get(at(op.param, s) + first + i, left));
                const vf power = load<vf>(kept + i) * sharp * -RG_LRU_SHARPNESS;
                const vf keep = begins ? vf{} : exp(power);
                const vf rest = 1.f - exp(power + power);
                float scale[LANES];
                store(scale, rest);
                for (float& each : scale) each = begins ? 1.f : std::sqrt(each);
                const vf taken = load<vf>(x + i) * load<vf>(opened + i) * load<vf>(scale);
                const vf now = keep * load<vf>(held + i) + taken;
                store(held + i, now);
                const vf gate = scans::get(at<T>(op.gate, s) + place + i, left);
                scans::put(out + i, scans::rounded<T>(now) * gate, left);
            }
            if (last) std::fill(out + width, out + width + stride(cols) - cols, T(0));
        },
        [&](int to) { std::copy_n(held, width, states + int64_t(to) * cols); });
}

}  // namespace

const Kernel rg_lru_scan_kernel[2] = {tiled<rg_lru_tiles, rg_lru<bf16>>,
                                      tiled<rg_lru_tiles, rg_lru<float>>};
