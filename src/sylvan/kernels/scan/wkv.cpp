// RWKV-4: each channel keeps a weighted mean of values; weights are held relative to their largest
// exponent.
#include "scan.h"

namespace {

constexpr int WKV_COLS = 4 * LANES;
constexpr float WKV_NOTHING = -1e38f;  // exponent of a mean over nothing

int wkv_tiles(const WkvScan& op, const Step& s) {
    return s.run->seqs * ceil_div(op.channels, WKV_COLS);
}

template <class T> void wkv(const WkvScan& op, const Step& s, int t, void* scratch) {
    const int channels = op.channels, blocks = ceil_div(channels, WKV_COLS);
    const int first = t % blocks * WKV_COLS, cols = std::min(WKV_COLS, channels - first);
    const scans::Span span = scans::span(*s.run, t / blocks);
    if (!span.rows) return;
    float* states = at(op.state, s) + first;
    auto* held = static_cast<float (*)[WKV_COLS]>(scratch);  // total, weight, exponent
    for (int part = 0; part < 3; part++)
        scans::widen(states + (int64_t(span.slot) * 3 + part) * channels, held[part], cols);
    const int padded = first + cols == channels ? int(stride(channels)) - first : cols;
    scans::walk(
        *s.run, span,
        [&](int row) {
            const int64_t place = int64_t(row) * stride(channels) + first;
            T* out = at<T>(op.out, s) + place;
            for (int i = 0; i < cols; i += LANES) {
                const int left = cols - i;
                const vf key = scans::get(at<T>(op.key, s) + place + i, left);
                const vf seen = scans::get(at<T>(op.value, s) + place + i, left);
                const vf gate = scans::get(at<T>(op.receptance, s) + place + i, left);
                const vf now = key + scans::get(at(op.time_first, s) + first + i, left);
                const vf fades = -exp(scans::get(at(op.time_decay, s) + first + i, left));
                const vf total = load<vf>(held[0] + i), weight = load<vf>(held[1] + i);
                vf top = load<vf>(held[2] + i);
                top = select(weight == 0.f, splat(WKV_NOTHING), top);
                vf most = max(top, now), kept = exp(top - most), fresh = exp(now - most);
                const vf mean = (kept * total + fresh * seen) / (kept * weight + fresh);
                const vf open = scans::rounded<T>(sigmoid(gate));
                scans::put(out + i, open * scans::rounded<T>(mean), left);
                most = max(top + fades, key);
                kept = exp(top + fades - most);
                fresh = exp(key - most);
                store(held[0] + i, kept * total + fresh * seen);
                store(held[1] + i, kept * weight + fresh);
                store(held[2] + i, most);
            }
            for (int i = cols; i < padded; i++) out[i] = 0;
        },
        [&](int to) {
            for (int part = 0; part < 3; part++)
                std::copy_n(held[part], cols, states + (int64_t(to) * 3 + part) * channels);
        });
}

}  // namespace

const Kernel wkv_scan_kernel[2] = {tiled<wkv_tiles, wkv<bf16>>, tiled<wkv_tiles, wkv<float>>};
