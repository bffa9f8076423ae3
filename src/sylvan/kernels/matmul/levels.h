// Quantises rows to int8, each with its own scale: the largest magnitude becomes 127. Ops whose
// rows a quantised linear layer reads write them in int8, too, while they are in the cache, which
// saves a pass over them.
#pragma once
#include "../native/kernel.h"

template <class T> static inline void quantise_row(const QuantisedRows& out, int cols,
                                                   const Step& s, int64_t r, const T* x) {
    if (!out.qvalues.present()) return;
    int group = out.group, zero = out.biased ? INT8_ZERO : 0, padded = out.bytes;
    uint8_t* q = at(out.qvalues, s) + r * padded;
    vf top{};
    for (int i = 0; i < stride(cols); i += LANES) top = max(top, abs(get(x + i)));
    float m = largest(top);
    at(out.scales, s)[r] = m / 127.f;
    vf inverse = splat(m > 0 ? 127.f / m : 0.f), magic = splat(12582912.f);
    int32_t* sums = at(out.sums, s);
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
