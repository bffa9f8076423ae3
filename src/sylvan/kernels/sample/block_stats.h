// Statistics of a row of logits: for each block of 256 ids, the largest logit and the sum of exp((x
// - largest) / temperature). They yield the largest logit and the softmax denominator of the row,
// and show which blocks must be read again. All callers use the same blocks, so sums are
// bit-identical.
#pragma once
#include "../native/kernel.h"
#include <cfloat>
#include <cmath>
#include <vector>

constexpr int STATS_BLOCK = 16 * LANES;  // the widest tile of a linear layer

struct BlockStats {
    // [num_blocks], padded to a multiple of LANES with minus infinity and 0
    const float *tops = nullptr, *sums = nullptr;
    int num_blocks = 0;  // 0: no statistics
};

static inline int count_blocks(int vocab) { return ceil_div(vocab, STATS_BLOCK); }

// Loads x[i .. i + 16]; lanes from n on are `beyond`.
static inline vf part(const float* x, int i, int n, float beyond) {
    if (n - i >= LANES) return load<vf>(x + i);
    vf v = splat(beyond);
    if (i < n) memcpy(&v, x + i, (n - i) * sizeof(float));
    return v;
}

// Replaces NaN by minus infinity and infinity by the largest finite number, so that sums are
// finite.
static inline vf cleaned(vf v) { return min(select(v == v, v, splat(-INFINITY)), splat(FLT_MAX)); }
static inline vf cleaned(const float* x, int i, int n) { return cleaned(part(x, i, n, -INFINITY)); }
static inline float cleaned(float x) { return x == x ? std::min(x, FLT_MAX) : -INFINITY; }

// Factor of logit differences: probabilities are powers of two, divided by the temperature.
static inline float scale_of(float temperature) { return float(1.4426950408889634 / temperature); }
constexpr float MIN_POWER = -126.f;  // the power below which a probability counts as 0
// The exponent of a weight. Monotonic in x, which the approximated power of two may not be.
static inline vf power(vf x, float top, float scale) { return (x - top) * scale; }
static inline vf weight_of(vf power) { return select(power > MIN_POWER, exp2(power), vf{}); }
// Unnormalised probability: 1 at `top`, 0 for NaN.
static inline vf weight(vf x, float top, float scale) { return weight_of(power(x, top, scale)); }

// Statistics of n ids, at most one block; the sum is 0 if all of them are masked out.
static inline void measure_block(const float* x, int n, float scale, float& top, float& total) {
    vf tops = splat(-INFINITY), sums{};
    int whole = n / LANES * LANES;
    // max returns the second operand if the first one is NaN
    for (int i = 0; i < whole; i += LANES) tops = max(load<vf>(x + i), tops);
    if (whole < n) tops = max(part(x, whole, n, -INFINITY), tops);
    top = std::min(largest(tops), FLT_MAX);
    auto add = [&](vf v) { sums += weight(v, top, scale); };
    if (top < FLT_MAX)
        for (int i = 0; i < whole; i += LANES) add(load<vf>(x + i));
    else
        for (int i = 0; i < whole; i += LANES) add(cleaned(load<vf>(x + i)));
    if (whole < n) add(cleaned(x, whole, n));
    total = sum(sums);
}

struct BlockStatsScratch {  // scratch memory, reused row by row
    std::vector<float> tops, sums;

    BlockStats of(const float* x, int n, float temperature) {
        BlockStats made = empty(n);
        float scale = scale_of(temperature);
        for (int i = 0; i < made.num_blocks; i++)
            measure_block(x + i * STATS_BLOCK, std::min(STATS_BLOCK, n - i * STATS_BLOCK), scale,
                          tops[i], sums[i]);
        return made;
    }
    BlockStats empty(int n) {
        int num_blocks = count_blocks(n), size = round_up(num_blocks, LANES);
        tops.assign(size, -INFINITY);
        sums.assign(size, 0.f);
        return {tops.data(), sums.data(), num_blocks};
    }
};
