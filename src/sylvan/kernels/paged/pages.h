// Layout of keys and values in pages. A word of E::ELEMENTS numbers (two bf16, or one float32) is
// the unit of a dot product.
// K: [page][head][token / 16][word of columns][16][elements]
// V: [page][head][token / elements][column][elements]
// Pages of int8 and fp8 hold numbers in the same order, one byte each, followed for each head by a
// float32 scale per token. int4 pages have half as many columns: the low nibble of a byte is from
// the first half of the columns, the high nibble from the second. Their heads are rotated first
// (QuaRot, arXiv:2404.00456), which spreads outlier columns over all: queries like keys, and
// attention rotates its results back.
#pragma once
#include "../native/kernel.h"
#include <cmath>

constexpr int KEY_PAD = 32, VALUE_PAD = 16;  // columns of a head are padded to a multiple of these

struct Heads {
    int hq, hkv, dim, v_dim, page;
    bool small, nibbles, shared;
    int64_t k_dim, v_pad;  // padded columns
    int64_t k_page, v_page;

    explicit Heads(const KVPages& kv)
        : hq(kv.num_heads), hkv(kv.num_kv_heads), dim(kv.head_dim), v_dim(kv.value_dim),
          page(kv.page_size),
          small(kv.format != PageFormat::ROWS && kv.format != PageFormat::SHARED),
          nibbles(kv.format == PageFormat::INT4), shared(kv.format == PageFormat::SHARED),
          k_dim(round_up(dim, KEY_PAD)), v_pad(round_up(v_dim, VALUE_PAD)), k_page(kv.key_step),
          v_page(kv.value_step) {}
    int64_t qkv_stride() const { return stride((hq + hkv) * dim + hkv * v_dim); }
    int64_t k_head(int64_t page_id, int head) const {
        return page_id * k_page + head * page * (width(k_dim) + scale_bytes());
    }
    int64_t v_head(int64_t page_id, int head) const {
        return page_id * v_page + head * page * (width(v_pad) + scale_bytes());
    }
    // numbers of pages that columns take
    int64_t width(int64_t cols) const { return nibbles ? cols / 2 : cols; }
    int64_t scale_bytes() const { return small ? sizeof(float) : 0; }
};

constexpr float NIBBLE_MIDDLE = 7.5f;  // levels are 0 .. 15

// 8-bit floats: a sign, EXPONENT bits with a bias of BIAS, and FRACTION bits; subnormals, below
// 2^(1 - BIAS), are multiples of SMALLEST.
template <int EXPONENT> struct Float8 {
    static constexpr int FRACTION = 7 - EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1,
                         SHIFT = 23 - FRACTION, REBIAS = 127 - BIAS;
    static constexpr float MAX = EXPONENT == 4 ? 448.f : 57344.f,
                           MIN_NORMAL = EXPONENT == 4 ? 0x1p-6f : 0x1p-14f;
    static constexpr float SMALLEST = EXPONENT == 4 ? 0x1p-9f : 0x1p-16f;

    static SYLVAN_INLINE vf value(vu code) {
        vu magnitude = code & 127u;
        vf normal = (vf)((magnitude << SHIFT) + (uint32_t(REBIAS) << 23)),
           below = converted<vf>((vi)magnitude) * SMALLEST;
        vf found = select((vi)magnitude < (1 << FRACTION), below, normal);
        return (vf)((vu)found | (code & 128u) << 24);
    }
    static SYLVAN_INLINE vu code(vf x) {  // rounds to nearest even; |x| is at most MAX
        vf a = abs(x);
        vu bits = (vu)a, odd = bits >> SHIFT & 1u;
        vu normal =
            ((bits + odd + ((1u << (SHIFT - 1)) - 1)) >> SHIFT) - (uint32_t(REBIAS) << FRACTION);
        vf magic = splat(12582912.f);
        vu below = (vu)((vi)(a * (1.f / SMALLEST) + magic) - (vi)magic);
        return select(a < MIN_NORMAL, below, normal) | ((vu)x >> 24 & 128u);
    }
};

// Rotates a head by the normal Hadamard matrix, which is its own inverse; `cols` is a power of two.
static inline void hadamard(float* x, int cols) {
    for (int half = 1; half < cols; half *= 2)
        for (int start = 0; start < cols; start += 2 * half)
            for (int i = start; i < start + half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    vf norm = splat(1.f / std::sqrt(float(cols)));
    for (int i = 0; i < cols; i += LANES) store(x + i, load<vf>(x + i) * norm);
}
