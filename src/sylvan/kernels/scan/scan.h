// Recurrences over the rows of each request. A tile processes all rows of a request in order, with
// a block of its state in scratch memory, so the bits of a row depend only on the rows before it,
// not on how a prompt was divided into steps. Therefore chunked scans by matrix products cannot be
// used: their sums begin at a chunk, but steps, prefix hits and saved states begin at any row.
#pragma once
#include "../native/kernel.h"
#include <cmath>

namespace scans {

struct Span {  // the rows of one request, and where its state is read and goes
    int start, rows, slot, first_save, last_save;
};

static inline Span span(const Run& run, int seq) {
    const int32_t *start = run.row_start + seq, *saves = run.first_saves + seq;
    return {start[0], start[1] - start[0], run.state_slots[seq], saves[0], saves[1]};
}

// Calls row(i) for all rows of a span, and keep(slot) where a copy of the state is saved, and
// finally in its own slot.
template <class Row, class Keep>
static inline void walk(const Run& run, const Span& span, Row&& row, Keep&& keep) {
    const int32_t* saves = run.saves;
    int next = span.first_save;
    for (int i = 0; i < span.rows; i++) {
        row(span.start + i);
        for (; next < span.last_save && saves[2 * next] == i + 1; next++) keep(saves[2 * next + 1]);
    }
    if (span.rows) keep(span.slot);
}

static inline float number(float x) { return x; }
static inline float number(bf16 x) {
    uint32_t word = uint32_t(x) << 16;
    float out;
    memcpy(&out, &word, sizeof out);
    return out;
}

// The first n (16 if there are more) numbers at p, then zeros; no other memory is read or written.
template <class T> static inline vf get(const T* p, int n) {
    if (n >= LANES) return ::get(p);
    T some[LANES] = {};
    std::copy_n(p, std::max(n, 0), some);
    return ::get(some);
}
template <class T> static inline void put(T* p, vf v, int n) {
    if (n >= LANES) return ::put(p, v);
    T some[LANES];
    ::put(some, v);
    std::copy_n(some, std::max(n, 0), p);
}

template <class T> static inline void widen(const T* from, float* to, int n) {
    for (int i = 0; i < n; i += LANES) store(to + i, get(from + i, n - i));  // zeros at the end
}
template <class T> static inline vf rounded(vf v) {
    T some[LANES];
    ::put(some, v);
    return ::get(some);
}

// Sums over the keys of a matrix use four chains; that number determines the bits.
constexpr int CHAINS = 4;

// Calls f(key, chain) for all keys, with the chain as a compile-time constant.
template <class F> static inline SYLVAN_INLINE void each_key(int keys, F&& f) {
    int key = 0;
    for (; key + CHAINS <= keys; key += CHAINS)
        unrolled<CHAINS>([&](auto i) SYLVAN_INLINE { f(key + i, i); });
    unrolled<CHAINS>([&](auto i) SYLVAN_INLINE {
        if (key + i < keys) f(key + i, i);
    });
}

// log(1 + exp(x)): the logarithm as a series of z = y / (2 + y), y = exp(-|x|), z at most 1/3.
static inline vf softplus(vf x) {
    vf y = exp(-abs(x)), z = y / (y + 2.f), s = z * z;
    vf series = horner(s, splat(1.f / 15), 1.f / 13, 1.f / 11, 1.f / 9, 1.f / 7, .2f, 1.f / 3, 1.f);
    return max(x, vf{}) + (z + z) * series;
}

}  // namespace scans
