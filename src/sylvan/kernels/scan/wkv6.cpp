// RWKV-5 and RWKV-6: each head keeps a matrix with a row per key column; rows decay, by constants
// or by numbers of the token, and the newest value counts with a weight of its own.
#include "scan.h"

namespace {

constexpr int WKV6_COLS = 2 * LANES, WKV6_MOST = 256;

int wkv6_tiles(const Wkv6Scan& op, const Step& s) {
    return s.run->seqs * op.num_heads * ceil_div(op.width, WKV6_COLS);
}

// Numbers of a head's keys in a row.
struct Wkv6Row {
    alignas(64) float query[WKV6_MOST], key[WKV6_MOST], keep[WKV6_MOST];
};

void wkv6_keeps(const float* decay, int width, float* keep) {
    for (int i = 0; i < width; i += LANES)
        store(keep + i, exp(-exp(scans::get(decay + i, width - i))));
}

template <class T> void wkv6(const Wkv6Scan& op, const Step& s, int t, void* scratch) {
    const int width = op.width, heads = op.num_heads, blocks = ceil_div(width, WKV6_COLS);
    const int head = t / blocks % heads, first = t % blocks * WKV6_COLS, begin = head * width;
    const int cols = std::min(WKV6_COLS, width - first);
    const scans::Span span = scans::span(*s.run, t / blocks / heads);
    if (!span.rows) return;
    const int64_t size = int64_t(width) * width, slot = heads * size, step = stride(op.cols);
    float *states = at(op.state, s) + head * size + first, *held = static_cast<float*>(scratch);
    for (int key = 0; key < width; key++)
        scans::widen(states + span.slot * slot + int64_t(key) * width, held + key * WKV6_COLS,
                     cols);
    const bool last = head == heads - 1 && first + cols == width;  // pads rows with zeros
    const float* bonus = at(op.time_first, s) + begin;
    Wkv6Row row;
    if (op.time_decay.present()) wkv6_keeps(at(op.time_decay, s) + begin, width, row.keep);
    scans::walk(
        *s.run, span,
        [&](int r) {
            const int64_t place = r * step + begin;
            if (op.row_decay.present()) wkv6_keeps(at(op.row_decay, s) + place, width, row.keep);
            vf direct{};
            for (int i = 0; i < width; i += LANES) {
                const int left = width - i;
                const vf query = scans::get(at<T>(op.query, s) + place + i, left);
                const vf key = scans::get(at<T>(op.key, s) + place + i, left);
                direct = fma(query * key, scans::get(bonus + i, left), direct);
                store(row.query + i, query);
                store(row.key + i, key);
            }
            const vf own = splat(sum(direct));
            const T* value = at<T>(op.value, s) + place + first;
            float* out = at(op.out, s) + place + first;
            for (int i = 0; i < cols; i += LANES) {
                const vf v = scans::get(value + i, cols - i);
                vf sums[scans::CHAINS];
                unrolled<scans::CHAINS>([&](auto chain) SYLVAN_INLINE { sums[chain] = vf{}; });
                scans::each_key(width, [&](int key, auto chain) SYLVAN_INLINE {
                    float* at = held + key * WKV6_COLS + i;
                    const vf before = load<vf>(at);
                    auto& sum = sums[chain];
                    sum = fma(before, splat(row.query[key]), sum);
                    store(at, fma(splat(row.key[key]), v, before * row.keep[key]));
                });
                const vf recalled = (sums[0] + sums[1]) + (sums[2] + sums[3]);
                scans::put(out + i, fma(v, own, recalled), cols - i);
            }
            if (last) std::fill_n(out + cols, step - op.cols, 0.f);
        },
        [&](int to) {
            for (int key = 0; key < width; key++)
                std::copy_n(held + key * WKV6_COLS, cols,
                            states + to * slot + int64_t(key) * width);
        });
}

}  // namespace

const Kernel wkv6_scan_kernel[2] = {tiled<wkv6_tiles, wkv6<bf16>>, tiled<wkv6_tiles, wkv6<float>>};
