// Head norms and rotary positions of queries and keys, and the store of keys and values into their pages.
// buf: qkv (q is rewritten in place), K, V, cos|sin f32 or none, q norm weight f32 or none, k norm weight or none
// n: see pages.h, 5 columns that turn, 6 interleaved, 7 the q norm is over all heads at once, 8 likewise k
// f: eps of the q norm, of the k norm
#include "pages.h"
#include <cmath>

namespace {

struct Norm {  // of heads: `weight` null means none; over all heads at once where `scale` is set
    const float* weight;
    float eps, scale;
};

struct Turn {
    const float *cos, *sin;
    int dim;
    bool interleaved;
};

template <class T> float inverse_rms(const T* row, int cols, float eps) {
    vf squares{};
    for (int i = 0; i < cols; i += LANES) {
        vf v = first(get(row + i), cols - i);
        squares = fma(v, v, squares);
    }
    return 1.f / std::sqrt(sum(squares) / float(cols) + eps);
}

void normalise(float* head, int dim, const Norm& norm) {
    vf scale = splat(norm.scale != 0 ? norm.scale : inverse_rms(head, dim, norm.eps));
    for (int i = 0; i < dim; i += LANES) store(head + i, load<vf>(head + i) * scale * load<vf>(norm.weight + i));
}

void rotate(float* head, const Turn& turn) {
    float turned[MAX_HEAD + LANES];
    int half = turn.dim / 2;
    if (turn.interleaved)
        for (int i = 0; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            turned[2 * i] = a * turn.cos[i] - b * turn.sin[i];
            turned[2 * i + 1] = b * turn.cos[i] + a * turn.sin[i];
        }
    else
        for (int i = 0; i < half; i += LANES) {
            vf a = load<vf>(head + i), b = load<vf>(head + half + i), c = load<vf>(turn.cos + i), z = load<vf>(turn.sin + i);
            vf x = fma(a, c, -(b * z)), y = fma(b, c, a * z);
            size_t bytes = std::min(LANES, half - i) * sizeof(float);
            memcpy(turned + i, &x, bytes), memcpy(turned + half + i, &y, bytes);
        }
    memcpy(head, turned, turn.dim * sizeof(float));
}

// Reads a head, works on it in float32 and rounds once; `out` is padded with zeros to a multiple of 32.
template <class T> void prepare(const T* in, T* out, int dim, const Norm& norm, const Turn& turn) {
    alignas(64) float head[MAX_HEAD + 2 * KEY_PAD];
    int padded = round_up(dim, KEY_PAD);
    for (int i = 0; i < padded; i += LANES) store(head + i, first(i < dim ? get(in + i) : vf{}, dim - i));
    if (norm.weight) normalise(head, dim, norm);
    if (turn.dim) rotate(head, turn);
    for (int i = 0; i < padded; i += LANES) put(out + i, first(load<vf>(head + i), dim - i));
}

template <class E> void rope_store(const Op& op, const Step& s, int64_t r) {
    typedef typename E::row T;
    constexpr int e = E::ELEMENTS;
    Heads h(op);
    T* row = at<T>(op, s, 0) + r * h.qkv_stride();
    const float* table = at<float>(op, s, 3);
    Turn turn{nullptr, nullptr, table ? op.n[5] : 0, op.n[6] != 0};
    if (table) turn.cos = table + int64_t(s.run->positions[r]) * turn.dim, turn.sin = turn.cos + turn.dim / 2;
    const T* keys = row + h.hq * h.dim;
    Norm q_norm{at<float>(op, s, 4), op.f[0], 0}, k_norm{at<float>(op, s, 5), op.f[1], 0};
    if (op.n[7]) q_norm.scale = inverse_rms(row, h.hq * h.dim, op.f[0]);
    if (op.n[8]) k_norm.scale = inverse_rms(keys, h.hkv * h.dim, op.f[1]);
    T head[MAX_HEAD + KEY_PAD];
    for (int i = 0; i < h.hq; i++, q_norm.weight += op.n[7] ? h.dim : 0) {
        prepare(row + i * h.dim, head, h.dim, q_norm, turn);
        memcpy(row + i * h.dim, head, h.dim * sizeof(T));
    }
    int slot = s.run->slots[r], off = slot % h.page, page = slot / h.page;
    // V is read in words of tokens: behind the newest token lies a stranger's old value, and 0 * NaN is NaN. Clear it.
    const int32_t* starts = s.run->row_start;
    bool newest = e > 1 && off % e == 0 && std::binary_search(starts + 1, starts + s.run->seqs + 1, int32_t(r) + 1);
    for (int i = 0; i < h.hkv; i++, k_norm.weight += op.n[8] ? h.dim : 0) {
        prepare(keys + i * h.dim, head, h.dim, k_norm, turn);
        T* k = at<T>(op, s, 1) + h.k_head(page, i) + off / LANES * LANES * h.k_dim + off % LANES * e;
        for (int d = 0; d < h.k_dim; d++) k[d / e * LANES * e + d % e] = head[d];
        const T* value = row + (h.hq + h.hkv) * h.dim + i * h.v_dim;
        T* v = at<T>(op, s, 2) + h.v_head(page, i) + off / e * e * h.v_pad + off % e;
        for (int d = 0; d < h.v_pad; d++) v[d * e] = d < h.v_dim ? value[d] : T(0);
        if (newest)
            for (int d = 0; d < h.v_pad; d++) v[d * e + e - 1] = 0;
    }
}

}  // namespace

const Kernel rope_store_kernel[2] = {{row_tiles, by_rows<rope_store<Bf16>>}, {row_tiles, by_rows<rope_store<F32>>}};
