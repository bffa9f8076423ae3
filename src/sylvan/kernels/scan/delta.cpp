// Gated delta rule: a memory S of values by keys decays by exp(g); then S += k (v - S k) beta, and S q comes out. Queries and keys
// are made unit vectors first, and queries divided by the root of their length.
// buf: q and k [rows][G][K], v [rows][H][V], g f32 [rows][H], beta [rows][H], state f32 [slots][H][K][V], out f32 [rows][H][V], and
// see scan.h. n: K, V, H, G, elements from row to row of q, k, v, g and beta; f: what is added to the squares of a vector.
#include "scan.h"

namespace {

// Sums over keys run in four chains, whose number is part of the bits; how many columns a tile has is not.
constexpr int DELTA_CHAINS = 4, DELTA_VECTORS = REGISTER == 64 ? 2 : 1, DELTA_COLS = DELTA_VECTORS * LANES, DELTA_SPANS = 7;

int delta_tiles(const Op& op, const Step& s) { return s.run->seqs * op.n[2] * ceil_div(op.n[1], DELTA_COLS); }

template <class T> void unit(const T* from, float* to, int n, float eps, float scale) {
    vf squares{};
    for (int i = 0; i < n; i += LANES) {
        vf v = scans::get(from + i, n - i);
        store(to + i, v);
        squares = fma(v, v, squares);
    }
    const vf factor = splat(scale / std::sqrt(sum(squares) + eps));
    for (int i = 0; i < n; i += LANES) store(to + i, load<vf>(to + i) * factor);
}

// Calls f(key, chain) for all keys, with the chain as a compile-time constant.
template <class F> static inline SYLVAN_INLINE void each_key(int keys, F&& f) {
    int key = 0;
    for (; key + DELTA_CHAINS <= keys; key += DELTA_CHAINS) unrolled<DELTA_CHAINS>([&](auto i) SYLVAN_INLINE { f(key + i, i); });
    unrolled<DELTA_CHAINS>([&](auto i) SYLVAN_INLINE { if (key + i < keys) f(key + i, i); });
}

template <class T> void delta(const Op& op, const Step& s, int t, void* scratch) {
    const int keys = op.n[0], values = op.n[1], heads = op.n[2], blocks = ceil_div(values, DELTA_COLS);
    const int head = t / blocks % heads, of = head / (heads / op.n[3]), first = t % blocks * DELTA_COLS;
    const scans::Span span = scans::span(op, s, t / blocks / heads, DELTA_SPANS);
    if (!span.rows) return;
    float* state = at<float>(op, s, 5) + int64_t(head) * keys * values + first;
    float* out = at<float>(op, s, 6) + head * values + first;
    float *held = static_cast<float*>(scratch), *q = held + keys * DELTA_COLS, *k = q + round_up(keys, LANES);
    const int64_t slot = int64_t(heads) * keys * values;
    auto left = [&](int v) { return values - first - v * LANES; };
    for (int key = 0; key < keys; key++)
        for (int v = 0; v < DELTA_VECTORS; v++) {
            const float* from = state + span.slot * slot + int64_t(key) * values + v * LANES;
            store(held + key * DELTA_COLS + v * LANES, left(v) > 0 ? scans::get(from, left(v)) : vf{});
        }
    scans::walk(op, s, span, DELTA_SPANS, [&](int row) {
        const float eps = op.f[0], keep = exp1(at<float>(op, s, 3)[int64_t(row) * op.n[7] + head]);
        const float beta = scans::number(at<T>(op, s, 4)[int64_t(row) * op.n[8] + head]);
        unit(at<T>(op, s, 0) + int64_t(row) * op.n[4] + of * keys, q, keys, eps, 1.f / std::sqrt(float(keys)));
        unit(at<T>(op, s, 1) + int64_t(row) * op.n[5] + of * keys, k, keys, eps, 1.f);
        const T* value = at<T>(op, s, 2) + int64_t(row) * op.n[6] + head * values + first;
        vf sums[DELTA_CHAINS * DELTA_VECTORS], error[DELTA_VECTORS];
        auto clear = [&] { unrolled<DELTA_CHAINS * DELTA_VECTORS>([&](auto i) SYLVAN_INLINE { sums[i] = vf{}; }); };
        auto total = [&](auto v) SYLVAN_INLINE {
            return (sums[v] + sums[DELTA_VECTORS + v]) + (sums[2 * DELTA_VECTORS + v] + sums[3 * DELTA_VECTORS + v]);
        };
        clear();
        each_key(keys, [&](int key, auto chain) SYLVAN_INLINE {
            unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
                float* at = held + key * DELTA_COLS + v * LANES;
                vf now = load<vf>(at) * keep;
                store(at, now);
                auto& sum = sums[chain * DELTA_VECTORS + v];
                sum = fma(now, splat(k[key]), sum);
            });
        });
        unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
            vf wanted = left(v) > 0 ? scans::get(value + v * LANES, left(v)) : vf{};
            error[v] = (wanted - total(v)) * beta;
        });
        clear();
        each_key(keys, [&](int key, auto chain) SYLVAN_INLINE {
            unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
                float* at = held + key * DELTA_COLS + v * LANES;
                vf now = fma(splat(k[key]), error[v], load<vf>(at));
                store(at, now);
                auto& sum = sums[chain * DELTA_VECTORS + v];
                sum = fma(now, splat(q[key]), sum);
            });
        });
        unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
            float* to = out + int64_t(row) * heads * values + v * LANES;
            if (left(v) > 0) scans::put(to, total(v), left(v));
        });
    }, [&](int to) {
        for (int key = 0; key < keys; key++)
            for (int v = 0; v * LANES < DELTA_COLS && left(v) > 0; v++)
                scans::put(state + to * slot + int64_t(key) * values + v * LANES, load<vf>(held + key * DELTA_COLS + v * LANES), left(v));
    });
}

}  // namespace

const Kernel delta_scan_kernel[2] = {{delta_tiles, delta<bf16>}, {delta_tiles, delta<float>}};
