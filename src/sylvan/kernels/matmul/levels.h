// Rows rounded to int8, each by itself: the largest magnitude becomes 127. Any op whose result has n[0] columns may leave
// its rows so as well, for the linear layers that read them: they are in the cache, and no pass over them is needed.
#pragma once
#include "../native/kernel.h"

// buf: 8 levels or none, 9 scales [rows], 10 sums i32 [rows][groups] or none
// n: 0 cols, 8 group, 9 whether the zero point of int8 weights is wanted, 10 bytes of a row of levels
enum { LEVELS = 8, LEVEL_SCALE, LEVEL_SUMS };

template <class T> static inline void quantise_row(const Op& op, const Step& s, int64_t r, const T* x) {
    if (op.buf[LEVELS] < 0) return;
    int cols = op.n[0], group = op.n[8], zero = op.n[9] ? INT8_ZERO : 0, padded = op.n[10];
    uint8_t* q = at<uint8_t>(op, s, LEVELS) + r * padded;
    vf top{};
    for (int i = 0; i < stride(cols); i += LANES) top = max(top, abs(get(x + i)));
    float m = largest(top);
    at<float>(op, s, LEVEL_SCALE)[r] = m / 127.f;
    vf inverse = splat(m > 0 ? 127.f / m : 0.f), magic = splat(12582912.f);
    int32_t* sums = at<int32_t>(op, s, LEVEL_SUMS);
    int count = sums ? padded / group : 1, size = padded / count;
    for (int g = 0; g < count; g++) {
        vi total{};
        for (int i = g * size, end = std::min(i + size, int(stride(cols))); i < end; i += LANES) {
            vi v = (vi)(get(x + i) * inverse + magic) - (vi)magic;
            narrow(q + i, v + zero);
            total += v;
        }
        if (sums) sums[r * count + g] = sum(total);
    }
    memset(q + stride(cols), zero, padded - stride(cols));
}
