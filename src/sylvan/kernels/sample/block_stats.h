// Statistics of a row of logits: for each piece of 256 ids, the largest logit and the sum of exp((x
// - largest) / temperature). They yield the largest logit and the total probability of the row, and
// show which pieces to look at again. All callers use the same pieces, so sums are bit-identical.
#pragma once
#include "../native/kernel.h"
#include <cfloat>
#include <cmath>
#include <vector>

constexpr int PIECE = 16 * LANES;  // the widest tile of a linear layer

struct BlockStats {
    // [pieces], up to a multiple of LANES: minus infinity and 0 beyond
    const float *tops = nullptr, *sums = nullptr;
    int pieces = 0;  // 0: there was none
};

static inline int pieces_of(int vocab) { return ceil_div(vocab, PIECE); }

static inline vf part(const float* x, int i, int n, float beyond) {  // sixteen of n, then `beyond`
    if (n - i >= LANES) return load<vf>(x + i);
    vf v = splat(beyond);
    if (i < n) memcpy(&v, x + i, (n - i) * sizeof(float));
    return v;
}

// NaN can never win; infinities become the largest finite number: sums stay finite
static inline vf cleaned(vf v) { return min(select(v == v, v, splat(-INFINITY)), splat(FLT_MAX)); }
static inline vf cleaned(const float* x, int i, int n) { return cleaned(part(x, i, n, -INFINITY)); }
static inline float cleaned(float x) { return x == x ? std::min(x, FLT_MAX) : -INFINITY; }

// Division by the temperature: probabilities are powers of two of differences over `scale`.
static inline float scale_of(float temperature) { return float(1.4426950408889634 / temperature); }
constexpr float MIN_POWER = -126.f;  // the power below which a probability counts as 0
// rises with x, as its power of two may not
static inline vf power(vf x, float top, float scale) { return (x - top) * scale; }
static inline vf weight_of(vf power) { return select(power > MIN_POWER, exp2(power), vf{}); }
// 1 at `top`, 0 for NaN
static inline vf weight(vf x, float top, float scale) { return weight_of(power(x, top, scale)); }

// Of n ids, at most one piece; the sum is 0 if none is possible.
static inline void measure_piece(const float* x, int n, float scale, float& top, float& total) {
    vf tops = splat(-INFINITY), sums{};
    int whole = n / LANES * LANES;
    // the second if the first is no number
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
        for (int i = 0; i < made.pieces; i++)
            measure_piece(x + i * PIECE, std::min(PIECE, n - i * PIECE), scale, tops[i], sums[i]);
        return made;
    }
    BlockStats empty(int n) {
        int pieces = pieces_of(n), size = round_up(pieces, LANES);
        tops.assign(size, -INFINITY);
        sums.assign(size, 0.f);
        return {tops.data(), sums.data(), pieces};
    }
};
