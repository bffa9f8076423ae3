// Codes of weights and their values. All values have at most eight significant bits, so bfloat16
// holds them exactly; only NF4 is rounded to it.
#pragma once
#include "../native/kernel.h"

// The 16 values of a 4-bit code, twice; differences from a zero point are five-bit numbers and use
// all 32 entries.
struct FourBitTable {
    alignas(64) uint16_t bits[32];
};
static constexpr uint16_t bf16_of(float x) {
    return uint16_t(__builtin_bit_cast(uint32_t, x) >> 16);
}
static constexpr FourBitTable four_bits(const float (&values)[16]) {
    FourBitTable t{};
    for (int i = 0; i < 32; i++) t.bits[i] = bf16_of(values[i % 16]);
    return t;
}
static constexpr FourBitTable differences() {
    FourBitTable t{};
    for (int i = 0; i < 32; i++) t.bits[i] = bf16_of(float(i < 16 ? i : i - 32));
    return t;
}
constexpr float LEVELS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float UNSIGNED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float NF4[16] = {-1,
                           -.6953125f,
                           -.5234375f,
                           -.39453125f,
                           -.28515625f,
                           -.1845703125f,
                           -.0908203125f,
                           0,
                           .07958984375f,
                           .1611328125f,
                           .24609375f,
                           .337890625f,
                           .44140625f,
                           .5625f,
                           .72265625f,
                           1};
// times twelve
constexpr float FP4_BNB[16] = {0,    .0625f,  8,  12,  4,  6,  2,  3,
                               -0.f, -.0625f, -8, -12, -4, -6, -2, -3};
constexpr float IQ4_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                              1,    13,   25,  38,  53,  69,  89,  113};
constexpr float IQ3_XXS[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                               -4, -12, -20, -28, -36, -44, -52, -62};
constexpr float IQ3_S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr float IQ2[16] = {8, 25, 43, 1, 7, 9, 0, 0, -8, -25, -43, -1, -7, -9, -0.f, -0.f};
constexpr FourBitTable BY_LEVEL = four_bits(LEVELS), BY_UNSIGNED = four_bits(UNSIGNED),
                       BY_DIFFERENCE = differences(), BY_E2M1 = four_bits(E2M1),
                       BY_NF4 = four_bits(NF4), BY_FP4_BNB = four_bits(FP4_BNB),
                       BY_IQ4_NL = four_bits(IQ4_NL), BY_IQ3_XXS = four_bits(IQ3_XXS),
                       BY_IQ3_S = four_bits(IQ3_S), BY_IQ2 = four_bits(IQ2);

// The values of a 4-bit code that are no range of integers.
struct Listed {
    const float* values;
    const FourBitTable* table;
};
static inline Listed listed(Code code) {
    switch (code) {
    case Code::FP4_E2M1:
        return {E2M1, &BY_E2M1};
    case Code::NF4:
        return {NF4, &BY_NF4};
    case Code::FP4_BNB:
        return {FP4_BNB, &BY_FP4_BNB};
    case Code::IQ4_NL:
        return {IQ4_NL, &BY_IQ4_NL};
    case Code::IQ3_XXS:
        return {IQ3_XXS, &BY_IQ3_XXS};
    case Code::IQ3_S:
        return {IQ3_S, &BY_IQ3_S};
    case Code::IQ2:
        return {IQ2, &BY_IQ2};
    default:
        return {nullptr, code == Code::UINT4 ? &BY_UNSIGNED : &BY_LEVEL};
    }
}

static inline int bits_of(Code code) {
    if (code == Code::INT6) return 6;
    return code == Code::INT8 || code == Code::FP8_E4M3 ? 8 : 4;
}

// Loads a scale for each of 16 outputs: IEEE half, float32 or bfloat16.
static inline vf from_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
    return {(Vector<float, 8>)_mm256_cvtph_ps(load<__m128i>(p)),
            (Vector<float, 8>)_mm256_cvtph_ps(load<__m128i>(p + 8))};
#else
    vu h = widened<uint16_t, vu>(p);
    vf magnitude = (vf)((h & 0x7fff) << 13) * 0x1p112f;  // finite, also for subnormal numbers
    return (vf)((vu)magnitude | (h & 0x8000) << 16);
#endif
}

constexpr int SUPERBLOCK = 256;  // inputs that share a step

// Scales, zero points and shifts, by block of 16 outputs and group: the groups of a block are
// contiguous. Those of type I8 count float16 steps, which lie by block and superblock: that of the
// scales, then that of the shifts if there are any. The products are exact.
struct Scales {
    const void *data, *shifts;
    const uint8_t* zeros;
    const uint16_t* steps;
    ScaleType type;
    int groups, next;  // of a block, and from one group to the next: 0 if a block has one scale
    int superblock;    // groups of one, as a power of two

    template <class O>
    Scales(const O& op, const Step& s, int all)
        : data(at(op.col_scale, s)), shifts(at(op.shifts, s)), zeros(at(op.zeros, s)),
          steps(at<uint16_t>(op.steps, s)), type(op.scale_type), groups(op.per_row ? 1 : all),
          next(op.per_row ? 0 : 1), superblock(__builtin_ctz(SUPERBLOCK / op.group)) {}

    int64_t place(int64_t block, int g) const { return (block * groups + g * next) * LANES; }
    // Whether the groups from g on have other steps than those before.
    bool starts(int g) const { return steps && !(g & ((1 << superblock) - 1)); }
    vf step(int64_t block, int g, bool shift) const {
        if (!steps) return vf{};
        int64_t number = block * (groups >> superblock) + (g >> superblock);
        if (shifts) number = 2 * number + shift;
        return from_half(steps + number * LANES);
    }
    // At a place, with the step of its superblock.
    vf scale(int64_t i, vf step) const {
        if (type == ScaleType::I8) return counted(data, i) * step;
        if (type == ScaleType::F16) return from_half(static_cast<const uint16_t*>(data) + i);
        if (type == ScaleType::BF16) return get(static_cast<const bf16*>(data) + i);
        return load<vf>(static_cast<const float*>(data) + i);
    }
    vf shift(int64_t i, vf step) const {
        if (type == ScaleType::I8) return counted(shifts, i) * step;
        return load<vf>(static_cast<const float*>(shifts) + i);
    }
    vf scale(int64_t block, int g) const { return scale(place(block, g), step(block, g, false)); }
    vf shift(int64_t block, int g) const { return shift(place(block, g), step(block, g, true)); }
    vu zero(int64_t block, int g) const { return widened<uint8_t, vu>(zeros + place(block, g)); }

private:
    static vf counted(const void* counts, int64_t i) {
        return converted<vf>(widened<int8_t, vi>(static_cast<const int8_t*>(counts) + i));
    }
};

// both hold bfloat16 numbers
static inline vu joined(vf first, vf second) { return (vu)first >> 16 | (vu)second; }

#if !defined(__AVX512F__)
static inline vf looked_up(const float* table, vu index) {
#if defined(__AVX2__)
    return mapped<vf>(
        [&](auto i) {
            __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)i);
            __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)i);
            return _mm256_blendv_ps(low, high,
                                    _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)i, 28)));
        },
        index);
#else
    uint32_t places[LANES];
    float found[LANES];
    store(places, index);
    for (int i = 0; i < LANES; i++) found[i] = table[places[i]];
    return load<vf>(found);
#endif
}
#endif

// PASSES: with at most so many passes over the rows, each pass decodes the weights itself.

// Pair I of some words of each of 16 outputs as words of two bfloat16 numbers.
template <bool ZEROS> struct FourBits {
    static constexpr int WORDS = 1, PAIRS = 4;
    static constexpr int PASSES = !ZEROS && TILE_ROWS > 4 ? 4 : 1;
#if defined(__AVX512F__)
    vu table;
    explicit FourBits(Code code) {
        table = load<vu>((ZEROS ? &BY_DIFFERENCE : listed(code).table)->bits);
    }
    vu zero(const Scales& scales, int64_t block, int g) const {
        if constexpr (!ZEROS) return vu{};
        vu z = scales.zero(block, g);
        return z | z << 16;
    }
    template <int I> SYLVAN_INLINE vu pair(const vu (&words)[1], vu zero) const {
        // bits above the fourth choose between equal halves of a table
        __m512i index = (__m512i)(words[0] >> (4 * I));
        if constexpr (ZEROS)
            index = _mm512_sub_epi16((__m512i)((vu)index & 0x000f000fu), (__m512i)zero);
        return (vu)_mm512_permutexvar_epi16(index, (__m512i)table);
    }
#else
    const float* table;
    uint32_t middle;
    explicit FourBits(Code code) : table(listed(code).values), middle(code == Code::INT4 ? 8 : 0) {}
    vu zero(const Scales& scales, int64_t block, int g) const {
        return ZEROS ? scales.zero(block, g) : vu{} + middle;
    }
    template <int I> SYLVAN_INLINE vu pair(const vu (&words)[1], vu zero) const {
        vu first = words[0] >> (4 * I) & 15u, second = words[0] >> (4 * I + 16) & 15u;
        if (!ZEROS && table) return joined(looked_up(table, first), looked_up(table, second));
        return joined(converted<vf>((vi)first - (vi)zero), converted<vf>((vi)second - (vi)zero));
    }
#endif
};

struct EightBits {  // around 128 where there are no zero points
    static constexpr int WORDS = 1, PAIRS = 2, PASSES = 1;
    static constexpr uint32_t WHOLE = 0x4b000000;  // 2^23 as a float, whose last bits count units
    explicit EightBits(Code) {}
    vu zero(const Scales& scales, int64_t block, int g) const {
        return (scales.zeros ? scales.zero(block, g) : vu{} + 128u) | WHOLE;
    }
    template <int I> SYLVAN_INLINE vu pair(const vu (&words)[1], vu zero) const {
        vu first = (words[0] >> (8 * I) & 255u) | WHOLE;
        vu second = (words[0] >> (8 * I + 16) & 255u) | WHOLE;
        return joined((vf)first - (vf)zero, (vf)second - (vf)zero);
    }
};

struct SixBitTable {
    alignas(64) uint16_t bits[64];
};
static constexpr SixBitTable six_bits() {
    SixBitTable t{};
    for (int i = 0; i < 64; i++) t.bits[i] = bf16_of(float(i - 32));
    return t;
}
constexpr SixBitTable BY_SIX_BITS = six_bits();

// Around 32. Two words have the low four bits of 16 inputs, a third the high two: those of pair i
// are bits 2 i and 2 i + 1 of its halves.
struct SixBits {
    static constexpr int WORDS = 3, PAIRS = 8, PASSES = 1;
#if defined(__AVX512F__)
    vu low = load<vu>(BY_SIX_BITS.bits), high = load<vu>(BY_SIX_BITS.bits + 32);
#endif
    explicit SixBits(Code) {}
    vu zero(const Scales&, int64_t, int) const { return vu{}; }
    template <int I> SYLVAN_INLINE vu pair(const vu (&words)[3], vu) const {
        vu four = words[I / 4] >> (4 * (I % 4));
#if defined(__AVX512F__)
        vu two = words[2];
        if constexpr (I < 2)
            two = two << (4 - 2 * I);
        else
            two = two >> (2 * I - 4);
        // bits above the sixth do not matter
        vu index = (four & 0x000f000fu) | (two & ~0x000f000fu);
        return (vu)_mm512_permutex2var_epi16((__m512i)low, (__m512i)index, (__m512i)high);
#else
        vu first = (four & 15u) | (words[2] << 4 >> (2 * I) & 48u);
        vu second = (four >> 16 & 15u) | (words[2] >> (12 + 2 * I) & 48u);
        return joined(converted<vf>((vi)first - 32), converted<vf>((vi)second - 32));
#endif
    }
};

alignas(64) constexpr uint16_t BELOW_NORMAL[32] = {// subnormal E4M3: multiples of 2^-9
                                                   0,
                                                   bf16_of(0x1p-9f),
                                                   bf16_of(0x1p-8f),
                                                   bf16_of(0x1.8p-8f),
                                                   bf16_of(0x1p-7f),
                                                   bf16_of(0x1.4p-7f),
                                                   bf16_of(0x1.8p-7f),
                                                   bf16_of(0x1.cp-7f)};

struct Fp8 {  // E4M3 without infinities: a sign, an exponent raised by 7, three bits
    static constexpr int WORDS = 1, PAIRS = 2, PASSES = 1;
#if defined(__AVX512F__)
    vu small = load<vu>(BELOW_NORMAL);
#endif
    explicit Fp8(Code) {}
    vu zero(const Scales&, int64_t, int) const { return vu{}; }
    template <int I> SYLVAN_INLINE vu pair(const vu (&words)[1], vu) const {
        vu codes = words[0] >> (8 * I) & 0x00ff00ffu, magnitude = codes & 0x007f007fu;
        vu sign = (codes & 0x00800080u) << 8;
#if defined(__AVX512F__)
        __m512i found = (__m512i)((magnitude << 4) + 0x3c003c00u);
        __mmask32 below = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(8));
        found = _mm512_mask_permutexvar_epi16(found, below, (__m512i)magnitude, (__m512i)small);
        return (vu)found | sign;
#else
        return joined(value(magnitude & 0x7fu), value(magnitude >> 16)) | sign;
#endif
    }

private:
    static SYLVAN_INLINE vf value(vu magnitude) {
        vf normal = (vf)((magnitude << 20) + (120u << 23));
        vf below = converted<vf>((vi)magnitude) * 0x1p-9f;
        return select((vi)magnitude < 8, below, normal);
    }
};

// Calls f with the type of a code, as `type`.
template <class F> static inline void with_code(Code code, bool zeros, F f) {
    switch (code) {
    case Code::FP8_E4M3:
        return f(std::type_identity<Fp8>{});
    case Code::INT8:
        return f(std::type_identity<EightBits>{});
    case Code::INT6:
        return f(std::type_identity<SixBits>{});
    case Code::INT4:
        if (zeros) return f(std::type_identity<FourBits<true>>{});
        [[fallthrough]];
    default:
        return f(std::type_identity<FourBits<false>>{});
    }
}
