// Gated delta rule: a memory S (values x keys) decays by exp(g), for the whole head or per key;
// then S += k (v - S k) beta, and the output is S q. Queries and keys are normalised first, and
// queries divided by the root of their length.
#include "scan.h"

namespace {

// The columns of a tile do not determine the bits.
constexpr int DELTA_VECTORS = REGISTER == 64 ? 2 : 1;
constexpr int DELTA_COLS = DELTA_VECTORS * LANES;

int delta_tiles(const DeltaScan& op, const Step& s) {
    return s.run->seqs * op.num_heads * ceil_div(op.value_dim, DELTA_COLS);
}

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

template <class T> float delta_beta(const DeltaScan& op, const Step& s, int64_t row, int head) {
    const T* beta = at<T>(op.beta, s) + row * op.beta_stride + op.beta_first + head;
    const float x = scans::number(*beta);
    return op.a_log.present() ? scans::rounded<T>(sigmoid(splat(x)))[0] : x;
}

// exp(g) of `count` neighbours in a row of decays from column `first` on.
template <class T> void delta_keeps(const DeltaScan& op, const Step& s, int64_t row, int first,
                                    int count, int head, float* keep) {
    const int64_t place = row * op.decay_stride + op.decay_first + first;
    const float *a_log = at(op.a_log, s), *bias = at(op.dt_bias, s);
    const vf rate = a_log ? exp(splat(a_log[head])) : vf{};
    for (int i = 0; i < count; i += LANES) {
        vf g;
        if (a_log) {
            const vf step = scans::get(at<T>(op.decay, s) + place + i, count - i);
            g = -(rate * scans::softplus(step + scans::get(bias + first + i, count - i)));
        } else
            g = scans::get(at<float>(op.decay, s) + place + i, count - i);
        store(keep + i, exp(g));
    }
}

template <class T, bool BY_KEY> void delta(const DeltaScan& op, const Step& s, int t,
                                           void* scratch) {
    const int keys = op.key_dim, values = op.value_dim, heads = op.num_heads;
    const int blocks = ceil_div(values, DELTA_COLS);
    const int head = t / blocks % heads, of = head / (heads / op.groups);
    const int first = t % blocks * DELTA_COLS;
    const scans::Span span = scans::span(*s.run, t / blocks / heads);
    if (!span.rows) return;
    float* state = at(op.state, s) + int64_t(head) * keys * values + first;
    float* out = at(op.out, s) + head * values + first;
    float *held = static_cast<float*>(scratch), *q = held + keys * DELTA_COLS;
    float *k = q + round_up(keys, LANES), *keeps = k + round_up(keys, LANES);
    const int64_t slot = int64_t(heads) * keys * values;
    const bool last = head == heads - 1 && first + DELTA_COLS >= values;  // pads rows with zeros
    const int padding = op.out_stride - heads * values;
    auto left = [&](int v) { return values - first - v * LANES; };
    for (int key = 0; key < keys; key++)
        for (int v = 0; v < DELTA_VECTORS; v++) {
            const float* from = state + span.slot * slot + int64_t(key) * values + v * LANES;
            store(held + key * DELTA_COLS + v * LANES,
                  left(v) > 0 ? scans::get(from, left(v)) : vf{});
        }
    scans::walk(
        *s.run, span,
        [&](int row) {
            const float eps = op.eps;
            const int64_t r = row;
            const float beta = delta_beta<T>(op, s, r, head);
            if (BY_KEY)
                delta_keeps<T>(op, s, r, head * keys, keys, head, keeps);
            else
                delta_keeps<T>(op, s, r, head, 1, head, keeps);
            const float keep = keeps[0];
            unit(at<T>(op.q, s) + r * op.q_stride + op.q_first + of * keys, q, keys, eps,
                 1.f / std::sqrt(float(keys)));
            unit(at<T>(op.k, s) + r * op.k_stride + op.k_first + of * keys, k, keys, eps, 1.f);
            const T* value = at<T>(op.v, s) + r * op.v_stride + op.v_first + head * values + first;
            vf sums[scans::CHAINS * DELTA_VECTORS], error[DELTA_VECTORS];
            auto clear = [&] {
                unrolled<scans::CHAINS * DELTA_VECTORS>([&](auto i)
                                                            SYLVAN_INLINE { sums[i] = vf{}; });
            };
            auto total = [&](auto v) SYLVAN_INLINE {
                return (sums[v] + sums[DELTA_VECTORS + v]) +
                       (sums[2 * DELTA_VECTORS + v] + sums[3 * DELTA_VECTORS + v]);
            };
            clear();
            scans::each_key(keys, [&](int key, auto chain) SYLVAN_INLINE {
                unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
                    float* at = held + key * DELTA_COLS + v * LANES;
                    vf now = load<vf>(at) * (BY_KEY ? keeps[key] : keep);
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
            scans::each_key(keys, [&](int key, auto chain) SYLVAN_INLINE {
                unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
                    float* at = held + key * DELTA_COLS + v * LANES;
                    vf now = fma(splat(k[key]), error[v], load<vf>(at));
                    store(at, now);
                    auto& sum = sums[chain * DELTA_VECTORS + v];
                    sum = fma(now, splat(q[key]), sum);
                });
            });
            unrolled<DELTA_VECTORS>([&](auto v) SYLVAN_INLINE {
                float* to = out + r * op.out_stride + v * LANES;
                if (left(v) > 0) scans::put(to, total(v), left(v));
            });
            if (last) std::fill_n(out + r * op.out_stride + values - first, padding, 0.f);
        },
        [&](int to) {
            for (int key = 0; key < keys; key++)
                for (int v = 0; v * LANES < DELTA_COLS && left(v) > 0; v++)
                    scans::put(state + to * slot + int64_t(key) * values + v * LANES,
                               load<vf>(held + key * DELTA_COLS + v * LANES), left(v));
        });
}

template <class T> void delta_scan(const DeltaScan& op, const Step& s, int t, void* scratch) {
    if (op.by_key)
        delta<T, true>(op, s, t, scratch);
    else
        delta<T, false>(op, s, t, scratch);
}

}  // namespace

const Kernel delta_scan_kernel[2] = {tiled<delta_tiles, delta_scan<bf16>>,
                                     tiled<delta_tiles, delta_scan<float>>};
