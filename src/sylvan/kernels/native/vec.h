// Vectors of sixteen lanes: the same kernels compile for AVX512, AVX2 and any other CPU. Only this
// file depends on the instruction set: dot products, fma, maximum, masks, rounding to bf16, powers
// of two and reciprocals (whose last bit differs between instruction sets). Built with
// -ffp-contract=off, so the source decides which products are fused; a compiler may choose
// differently in two instantiations of a template.
#pragma once
#include "lanes.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif
// Without dot products the portable code is compiled, which gives the same bits as on other CPUs.
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

typedef Vector<float, 16> vf;
typedef Vector<int32_t, 16> vi;
typedef Vector<uint32_t, 16> vu;
typedef uint16_t bf16;

constexpr int LANES = 16;

// Accumulators of one inner loop: half of the registers, all of them for 4 bits. FEW_VECTORS: for
// up to four rows, which use the remaining columns.
#if defined(__AVX512VNNI__)
constexpr int TILE_ROWS = 8, TILE_COLS = 2, FEW_VECTORS = 16;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 4, TILE_COLS = 1, FEW_VECTORS = 4;
#elif defined(__ARM_FEATURE_DOTPROD)  // 32 registers, four of which are sixteen lanes
constexpr int TILE_ROWS = 4, TILE_COLS = 1, FEW_VECTORS = 4;
#else
constexpr int TILE_ROWS = 2, TILE_COLS = 1, FEW_VECTORS = 2;
#endif

// Offset of int8 activations: VNNI multiplies unsigned by signed, the other instruction sets signed
// by signed.
#if (defined(__AVX512VNNI__) && !defined(__AMX_INT8__)) || defined(__AVXVNNI__)
constexpr int INT8_ZERO = 128;
#else
constexpr int INT8_ZERO = 0;
#endif

// Broadcasts a word with a load; otherwise compilers load a scalar and move it between units.
static inline vu repeated(const uint32_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    auto v = (Vector<uint32_t, 8>)_mm256_broadcast_ss(reinterpret_cast<const float*>(p));
    return {v, v};
#else
    return filled<vu>(*p);
#endif
}
static inline vf splat(float x) { return filled<vf>(x); }
static inline vf two(float a, float b) {  // and zeros
    const float x[LANES] = {a, b};
    return load<vf>(x);
}

constexpr auto larger = [](auto a, auto b) {  // the second if one is NaN
#if defined(__AVX512F__)
    return (decltype(a))_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (decltype(a))_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
};
constexpr auto smaller = [](auto a, auto b) {
#if defined(__AVX512F__)
    return (decltype(a))_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (decltype(a))_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
};
static inline vf max(vf a, vf b) { return mapped<vf>(larger, a, b); }
static inline vf min(vf a, vf b) { return mapped<vf>(smaller, a, b); }
static inline vf abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
// Converts a mask of lanes (all ones or all zeros) to one bit per lane.
template <class V> static inline uint32_t bits_of(V v) {
    constexpr int n = sizeof(V) / 4;
    if constexpr (halved<V>) return bits_of(v.lo) | bits_of(v.hi) << n / 2;
#if defined(__AVX512F__)
    else
        return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX2__)
    else
        return uint32_t(_mm256_movemask_ps((__m256)v));
#elif defined(__SSE2__)
    else
        return uint32_t(_mm_movemask_ps((__m128)v));
#else
    else {
        uint32_t all = 0;
        for (int i = 0; i < n; i++) all |= uint32_t(v[i] & 1) << i;
        return all;
    }
#endif
}
static inline uint32_t bits(vi v) { return bits_of(v); }
static inline bool any(vi v) { return bits_of(v) != 0; }
template <class F> static inline void each_bit(uint32_t bits, F f) {  // in rising order
    for (; bits; bits &= bits - 1) f(__builtin_ctz(bits));
}
alignas(64) constexpr int32_t NUMBERS[LANES] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
static inline vi lanes() { return load<vi>(NUMBERS); }
// the first n lanes, then zeros
static inline vf first(vf v, int n) { return select(lanes() < n, v, vf{}); }

static inline vf fma(vf a, vf b, vf c) {
    return mapped<vf>(
        [](auto x, auto y, auto z) {
#if defined(__AVX512F__)
            return _mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
            return _mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__ARM_FEATURE_DOTPROD)
            return vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
            return x * y + z;
#endif
        },
        a, b, c);
}

// Rows are bf16 or float32; every kernel computes in float32.
static inline vf get(const bf16* p) { return (vf)(widened<bf16, vu>(p) << 16); }
static inline vf get(const float* p) { return load<vf>(p); }

static inline void put(float* p, vf v) { store(p, v); }
static inline void put(bf16* p, vf v) {  // rounds to nearest even; NaN stays NaN
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtneps_pbh((__m512)v));
#else
    vu u = (vu)v;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    narrow(p, select(v == v, u, vu{} + 0x7fc0u));
#endif
}

// acc + w * x over one 32-bit word per lane: a float, a pair of bf16, or four int8.
struct F32 {
    typedef float row;
    typedef vf acc;
    static constexpr int ELEMENTS = 1;
    static inline vf dot(vf a, vu w, vu x) { return fma((vf)w, (vf)x, a); }
};

struct Bf16 {
    typedef bf16 row;
    typedef vf acc;
    static constexpr int ELEMENTS = 2;
    static inline vf dot(vf a, vu w, vu x) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)a, (__m512bh)w, (__m512bh)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return mapped<vf>(
            [](auto s, auto p, auto q) {
                auto left = vreinterpretq_bf16_u32((uint32x4_t)p);
                auto right = vreinterpretq_bf16_u32((uint32x4_t)q);
                return vbfdotq_f32((float32x4_t)s, left, right);
            },
            a, w, x);
#else
        a = fma((vf)(w << 16), (vf)(x << 16), a);
        return fma((vf)(w & 0xffff0000u), (vf)(x & 0xffff0000u), a);
#endif
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
// pairs stay below 2^15: see the callers
static inline __m256i sum_quads(__m256i unsigned8, __m256i signed8) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned8, signed8), _mm256_set1_epi16(1));
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
static inline vi dot_quads(vi a, vu w, vu x) {  // of signed bytes
    return mapped<vi>(
        [](auto s, auto p, auto q) {
            auto left = vreinterpretq_s8_u32((uint32x4_t)p);
            auto right = vreinterpretq_s8_u32((uint32x4_t)q);
            return vdotq_s32((int32x4_t)s, left, right);
        },
        a, w, x);
}
#endif

// Integer sums are exact, so their order never matters. The activations x are the second factor.
struct Int8 {  // w in [-128, 127], x in [-127, 127]; x + 128 as unsigned where INT8_ZERO says so
    typedef uint8_t row;
    typedef vi acc;
    static constexpr int ELEMENTS = 4;
    static inline vi dot(vi a, vu w, vu x) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)a, (__m512i)x, (__m512i)w);
#elif defined(__AVXVNNI__)
        return mapped<vi>(
            [](auto s, auto p, auto q) {
                return _mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)q, (__m256i)p);
            },
            a, w, x);
#elif defined(__AVX2__)
        return a + mapped<vi>(
                       [](auto p, auto q) {
                           return sum_quads(_mm256_abs_epi8((__m256i)p),
                                            _mm256_sign_epi8((__m256i)q, (__m256i)p));
                       },
                       w, x);
#elif defined(__ARM_FEATURE_DOTPROD)
        return dot_quads(a, w, x);
#else
        for (int b = 0; b < 4; b++)
            a += ((vi)(w << (24 - 8 * b)) >> 24) * ((vi)(x << (24 - 8 * b)) >> 24);
        return a;
#endif
    }
};

struct Int4 {  // w in [0, 15], x in [-127, 127]
    typedef uint8_t row;
    typedef vi acc;
    static constexpr int ELEMENTS = 4;
    static inline vi dot(vi a, vu w, vu x) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
        return mapped<vi>(
            [](auto s, auto p, auto q) {
                return _mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)p, (__m256i)q);
            },
            a, w, x);
#elif defined(__AVX2__)
        return a +
               mapped<vi>([](auto p, auto q) { return sum_quads((__m256i)p, (__m256i)q); }, w, x);
#elif defined(__ARM_FEATURE_DOTPROD)
        return dot_quads(a, w, x);
#else
        for (int b = 0; b < 4; b++)
            a += (vi)((w >> (8 * b)) & 255) * ((vi)(x << (24 - 8 * b)) >> 24);
        return a;
#endif
    }
};

// ((first * x + next) * x + ...): unrolled at any level of optimisation.
static inline vf horner(vf, vf total) { return total; }
template <class... Rest> static inline vf horner(vf x, vf total, float next, Rest... rest) {
    return horner(x, fma(total, x, splat(next)), rest...);
}

static inline vf exp(vf x) {  // 1e-7 relative on [-87, 88], clamped outside
    x = min(max(x, splat(-87.f)), splat(88.f));
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = fma(x, splat(1.44269504f), magic);
    vi e = (vi)n - (vi)magic;
    n -= magic;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = horner(r, splat(1.f / 720), 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f);
    return p * (vf)((e + 127) << 23);
}
static inline float exp1(float x) { return exp(splat(x))[0]; }

// 1.5e-7 relative, exactly 1 at 0; 0 or nearly 0 below -126; x is at most 126
static inline vf exp2(vf x) {
#if defined(__AVX512F__)
    vf part = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x less the integer below it
#else
    const vf magic = splat(12582912.f);
    x = max(x, splat(-126.f));
    vf whole = x - .5f + magic;
    vf part = x - (whole - magic);
#endif
    vf p = horner(part, splat(1.86713127e-3f), 9.01702775e-3f, 5.5799915e-2f, .24016445f,
                  .693151312f, 1.f);
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vf)(((vi)whole - (vi)magic + 127) << 23);
#endif
}

static inline vf reciprocal(vf x) {  // 1e-7 relative; x of 2^-120 .. 2^126
#if defined(__AVX512F__)
    vf r = (vf)_mm512_rcp14_ps((__m512)x);
    return fma(r, fma(-x, r, splat(1.f)), r);
#else
    return 1.f / x;
#endif
}

// 1e-7 * (2 + |x|) relative; NaN stays NaN only in a product with x
static inline vf sigmoid(vf x) {
    return reciprocal(exp2(min(x * -1.44269504f, splat(125.f))) + 1.f);
}

// 1 - 2 / (exp(2 |x|) + 1), odd; a short series where that would cancel
static inline vf tanh(vf x) {
    vf a = abs(x), s = x * x;
    vf large = 1.f - 2.f / (exp(a + a) + 1.f);
    vf small = horner(s, splat(-17.f / 315), 2.f / 15, -1.f / 3, 1.f);
    vi sign = (vi)x & (int32_t)0x80000000;
    return select(a < .15f, small * x, (vf)((vi)large | sign));
}

static inline vf erf(vf x) {  // 1.5e-7 absolute (Abramowitz and Stegun 7.1.26)
    vf a = abs(x), t = 1.f / fma(a, splat(0.3275911f), splat(1.f));
    vf p = horner(t, splat(1.061405429f), -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f);
    vf y = 1.f - p * t * exp(-(a * a));
    return (vf)((vi)y | ((vi)x & (int32_t)0x80000000));
}

template <class V> static inline auto sum(V v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}
static inline float largest(vf v) { return reduce(v, larger); }
