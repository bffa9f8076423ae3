// Head norms and rotary positions of queries and keys, and the store of keys and values into their
// pages. Queries are rewritten in place.
#include "rope.h"

namespace {

// Quantises a head to levels, the largest at 127; the scale is NaN if the head has a NaN.
template <class T> float to_levels(const T* x, int cols, int8_t* levels) {
    vf top{}, odd{}, magic = splat(12582912.f);
    for (int i = 0; i < cols; i += LANES) {
        vf v = first(get(x + i), cols - i);
        top = max(top, abs(v));
        odd += v * 0.f;
    }
    float m = largest(top);
    vf inverse = splat(m > 0 ? 127.f / m : 0.f);
    for (int i = 0; i < cols; i += LANES)
        narrow(levels + i, (vi)(first(get(x + i), cols - i) * inverse + magic) - (vi)magic);
    return m / 127.f + sum(odd);
}

// Quantises to 8-bit floats with the given scale, or with that of the largest magnitude if it is 0.
// NaN makes the scale NaN.
template <class F, class T> float to_floats(const T* x, int cols, int8_t* codes, float given) {
    vf top{}, odd{};
    for (int i = 0; i < cols; i += LANES) {
        vf v = first(get(x + i), cols - i);
        top = max(top, abs(v));
        odd += v * 0.f;
    }
    float m = largest(top), scale = given > 0 ? given : m > 0 ? m / F::MAX : 1.f;
    vf divisor = splat(scale), most = splat(F::MAX);
    for (int i = 0; i < cols; i += LANES)
        narrow((uint8_t*)codes + i,
               F::code(min(max(first(get(x + i), cols - i) / divisor, -most), most)));
    return scale + sum(odd);
}

// Quantises a head to 16 levels after rotating it.
template <class T> float to_nibbles(const T* x, int cols, int8_t* levels) {
    alignas(64) float head[MAX_HEAD];
    for (int i = 0; i < cols; i += LANES) store(head + i, get(x + i));
    hadamard(head, cols);
    vf top{}, odd{}, magic = splat(12582912.f);
    for (int i = 0; i < cols; i += LANES) {
        vf v = load<vf>(head + i);
        top = max(top, abs(v));
        odd += v * 0.f;
    }
    float m = largest(top);
    vf inverse = splat(m > 0 ? NIBBLE_MIDDLE / m : 0.f);
    for (int i = 0; i < cols; i += LANES)
        narrow(levels + i,
               ((vi)(load<vf>(head + i) * inverse + NIBBLE_MIDDLE + magic) - (vi)magic) & 15);
    return m / NIBBLE_MIDDLE + sum(odd);
}

// Keys and values of int4 pages. Each byte belongs to one token, so no two threads write it.
template <class E> void store_nibbles(const RopeStore& op, const Step& s, const Heads& h, int slot,
                                      int head, const typename E::row* key,
                                      const typename E::row* value) {
    constexpr int e = E::ELEMENTS;
    int off = slot % h.page, page = slot / h.page;
    int64_t key_half = h.k_dim / 2, value_half = h.v_pad / 2;
    alignas(64) int8_t levels[MAX_HEAD];
    auto* k = at<int8_t>(op.kv.keys, s) + h.k_head(page, head);
    auto* v = at<int8_t>(op.kv.values, s) + h.v_head(page, head);
    reinterpret_cast<float*>(k + h.page * key_half)[off] = to_nibbles(key, h.dim, levels);
    k += off / LANES * LANES * key_half + off % LANES * e;
    for (int d = 0; d < key_half; d++)
        k[d / e * LANES * e + d % e] = int8_t(levels[d] | levels[d + key_half] << 4);
    reinterpret_cast<float*>(v + h.page * value_half)[off] = to_nibbles(value, h.v_dim, levels);
    v += off / e * e * value_half + off % e;
    for (int d = 0; d < value_half; d++) v[d * e] = int8_t(levels[d] | levels[d + value_half] << 4);
}

// Rotates a query like the keys of int4 pages.
template <class T> void rotate_query(T* query, int cols) {
    alignas(64) float head[MAX_HEAD];
    for (int i = 0; i < cols; i += LANES) store(head + i, get(query + i));
    hadamard(head, cols);
    for (int i = 0; i < cols; i += LANES) put(query + i, load<vf>(head + i));
}

// Converts a head to the type of its pages; returns the scale. `scales`: of heads, or null.
template <class T> float to_small(PageFormat format, const T* x, int cols, int8_t* levels,
                                  const float* scales, int head) {
    float given = scales ? scales[head] : 0.f;
    if (format == PageFormat::FP8_E4M3) return to_floats<Float8<4>>(x, cols, levels, given);
    if (format == PageFormat::FP8_E5M2) return to_floats<Float8<5>>(x, cols, levels, given);
    return to_levels(x, cols, levels);
}

// Stores keys and values in 8- or 4-bit pages, with the scales of their heads.
template <class E> void store_levels(const RopeStore& op, const Step& s, const Heads& h, int slot,
                                     int head, const typename E::row* key,
                                     const typename E::row* value) {
    constexpr int e = E::ELEMENTS;
    int off = slot % h.page, page = slot / h.page;
    alignas(64) int8_t levels[MAX_HEAD + KEY_PAD] = {};
    auto* k = at<int8_t>(op.kv.keys, s) + h.k_head(page, head);
    auto* v = at<int8_t>(op.kv.values, s) + h.v_head(page, head);
    reinterpret_cast<float*>(k + h.page * h.k_dim)[off] =
        to_small(op.kv.format, key, h.dim, levels, at(op.k_scales, s), head);
    k += off / LANES * LANES * h.k_dim + off % LANES * e;
    for (int d = 0; d < h.k_dim; d++) k[d / e * LANES * e + d % e] = d < h.dim ? levels[d] : 0;
    reinterpret_cast<float*>(v + h.page * h.v_pad)[off] =
        to_small(op.kv.format, value, h.v_dim, levels, at(op.v_scales, s), head);
    v += off / e * e * h.v_pad + off % e;
    for (int d = 0; d < h.v_pad; d++) v[d * e] = d < h.v_dim ? levels[d] : 0;
}

// The words of a key are LANES words apart.
template <class E> void store_key(typename E::row* to, int lane, const typename E::row* key,
                                  int cols) {
    for (int d = 0; d < cols; d += E::ELEMENTS)
        memcpy(to + d * LANES + lane * E::ELEMENTS, key + d, 4);
}

// Values of E::ELEMENTS tokens share words; another thread may write the other tokens.
template <class E> void store_value(typename E::row* to, int token, const typename E::row* value,
                                    int cols, int padded) {
    constexpr int e = E::ELEMENTS;
    int d = 0;
#if defined(__AVX512BW__)
    if constexpr (e == 2)
        for (__mmask32 mine = 0x55555555u << token; d + LANES <= cols; d += LANES) {
            vu words = widened<bf16, vu>(value + d) << 16 * token;
            _mm512_mask_storeu_epi16(to + d * 2, mine, (__m512i)words);
        }
#endif
    for (; d < padded; d++) to[d * e + token] = d < cols ? value[d] : 0;
}

// Norms and rotates a head; if the norm comes last, the rotated head is rounded before it.
template <class T> void prepare_head(const RopeStore& op, const T* in, T* out, int dim,
                                     const Norm& norm, const Rope& rope) {
    if (!op.norm_last || !norm.weight) return prepare(in, out, dim, norm, rope);
    T rotated[MAX_HEAD + KEY_PAD];
    prepare(in, rotated, dim, Norm{nullptr, 0, 0}, rope);
    prepare(rotated, out, dim, norm, Rope{nullptr, nullptr, 0, false});
}

template <class E> void rope_store(const RopeStore& op, const Step& s, int64_t r) {
    typedef typename E::row T;
    constexpr int e = E::ELEMENTS;
    Heads h(op.kv);
    T* row = at<T>(op.qkv, s) + r * h.qkv_stride();
    const float *table = at(op.cos_sin, s), *q_scales = at(op.q_scales, s);
    Rope rope{nullptr, nullptr, table ? op.rotary_dim : 0, op.interleaved != 0};
    if (table) {
        rope.cos = table + int64_t(s.run->positions[r]) * rope.dim;
        rope.sin = rope.cos + rope.dim / 2;
    }
    const T* keys = row + h.hq * h.dim;
    Norm q_norm{at(op.q_norm, s), op.q_eps, 0}, k_norm{at(op.k_norm, s), op.k_eps, 0};
    if (op.q_norm_whole) q_norm.scale = inverse_rms(row, h.hq * h.dim, op.q_eps);
    if (op.k_norm_whole) k_norm.scale = inverse_rms(keys, h.hkv * h.dim, op.k_eps);
    T head[MAX_HEAD + KEY_PAD];
    for (int i = 0; i < h.hq; i++, q_norm.weight += op.q_norm_whole ? h.dim : 0) {
        prepare_head(op, row + i * h.dim, head, h.dim, q_norm, rope);
        if (q_scales)
            for (int d = 0; d < h.dim; d += LANES)
                put(head + d, get(head + d) * q_scales[s.run->positions[r]]);
        if (h.nibbles) rotate_query(head, h.dim);
        memcpy(row + i * h.dim, head, h.dim * sizeof(T));
    }
    const int32_t* slots =
        op.kv.whole_text ? s.texts.slots : s.run->slots + int64_t(op.kv.table) * s.run->slot_step;
    int slot = slots[r], off = slot % h.page, page = slot / h.page;
    // V is read in words of several tokens: after the newest token they hold stale data of another
    // request, and 0 * NaN is NaN. Clear them.
    const int32_t* starts = s.run->row_start;
    bool newest = e > 1 && off % e == 0 &&
                  std::binary_search(starts + 1, starts + s.run->seqs + 1, int32_t(r) + 1);
    for (int i = 0; i < h.hkv; i++, k_norm.weight += op.k_norm_whole ? h.dim : 0) {
        prepare_head(op, keys + i * h.dim, head, h.dim, k_norm, rope);
        const T* value = row + (h.hq + h.hkv) * h.dim + i * h.v_dim;
        if (h.nibbles) {
            store_nibbles<E>(op, s, h, slot, i, head, value);
            continue;
        }
        if (h.small) {
            store_levels<E>(op, s, h, slot, i, head, value);
            continue;
        }
        store_key<E>(at<T>(op.kv.keys, s) + h.k_head(page, i) + off / LANES * LANES * h.k_dim,
                     off % LANES, head, int(h.k_dim));
        if (h.shared) continue;
        T* v = at<T>(op.kv.values, s) + h.v_head(page, i) + off / e * e * h.v_pad;
        store_value<E>(v, off % e, value, h.v_dim, int(h.v_pad));
        if (newest)
            for (int d = 0; d < h.v_pad; d++) v[d * e + e - 1] = 0;
    }
}

}  // namespace

const Kernel rope_store_kernel[2] = {per_row<rope_store<Bf16>>, per_row<rope_store<F32>>};
