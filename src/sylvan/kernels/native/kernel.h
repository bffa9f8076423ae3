// Shared by the kernels of all ops. Invariance rule: every output element is produced by one tile,
// by a chain of operations whose order depends only on that element's own inputs. So a row's bits
// never depend on the other rows, the chunking of a prompt, the place of pages or the number of
// threads.
#pragma once
#include "program.h"
#include "vec.h"
#include <algorithm>
#include <type_traits>
#include <utility>

// Address of an op's buffer; null if absent.
template <class T> static inline T* at(Buf<T> buf, const Step& s) {
    return buf.present() ? static_cast<T*>(s.buf[buf.index]) : nullptr;
}
template <class T> static inline T* at(Buf<void> buf, const Step& s) {
    return buf.present() ? static_cast<T*>(s.buf[buf.index]) : nullptr;
}
static inline int rows(const Op& op, const Step& s) {
    return (op.rows == TOKENS ? s.run->tokens : s.run->outputs) * std::max(1, op.times);
}
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up(int a, int b) { return ceil_div(a, b) * b; }
static inline int64_t stride(int cols) { return round_up(cols, ROW_PAD); }

// Kernels are functions of the op that they are for: the first parameter of F.
template <class F> struct FirstParameter;
template <class R, class O, class... A> struct FirstParameter<R (*)(const O&, A...)> {
    typedef O type;
};
template <auto F> using OpOf = typename FirstParameter<decltype(F)>::type;
template <auto TILES> int count_tiles(const Op& op, const Step& s) {
    return TILES(static_cast<const OpOf<TILES>&>(op), s);
}
template <auto TILE> void run_tile(const Op& op, const Step& s, int t, void* scratch) {
    TILE(static_cast<const OpOf<TILE>&>(op), s, t, scratch);
}
template <auto TILES, auto TILE> constexpr Kernel tiled = {count_tiles<TILES>, run_tile<TILE>};

// Number of leading rows that belong to groups (expert, first row, number of rows): see MoeAlign.
static inline int grouped_rows(const int32_t* groups) {
    int count = groups[0];
    return count ? groups[3 * count - 1] + groups[3 * count] : 0;
}

// Row-wise ops: a tile is a few rows.
constexpr int ROW_TILE = 4;
static inline int row_tiles(const Op& op, const Step& s) { return ceil_div(rows(op, s), ROW_TILE); }
template <auto F> void by_rows(const Op& op, const Step& s, int t, void*) {
    const auto& mine = static_cast<const OpOf<F>&>(op);
    for (int r = t * ROW_TILE, e = std::min(r + ROW_TILE, rows(op, s)); r < e; r++) F(mine, s, r);
}
template <auto F> constexpr Kernel per_row = {row_tiles, by_rows<F>};

// Calls f with n, in 1 .. MAX, as a compile-time constant.
template <int MAX, class F> static inline void constant(int n, F&& f) {
    if constexpr (MAX == 1)
        f(std::integral_constant<int, 1>{});
    else if (n == MAX)
        f(std::integral_constant<int, MAX>{});
    else
        constant<MAX - 1>(n, f);
}

// Calls f with 0, 1, .. N - 1 as compile-time constants: the loop is unrolled, and arrays indexed
// by these numbers can stay in registers.
template <int N, class F> static inline __attribute__((always_inline)) void unrolled(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}
#define SYLVAN_INLINE __attribute__((always_inline))

// Prefetch of weights into the L2 cache during a product: `words` ahead of the current vector, plus
// `jump` words if that is past the last one. 0 `words`: no prefetch.
struct Prefetch {
    int words = 0;
    int64_t jump = 0;
};

// The one inner loop: acc[m][n] += x[m] . w[n] over `words` words, the vectors of w `step` words
// apart.
template <class E, int M, int N>
static inline __attribute__((always_inline)) void
multiply(typename E::acc (&acc)[M][N], const uint32_t* x, int64_t xs, const uint32_t* w, int64_t ws,
         int64_t step, int words, Prefetch ahead = {}) {
    const int64_t end = words * step - ahead.words;
    typename E::acc sums[M * N];
    unrolled<M * N>([&](auto i) SYLVAN_INLINE { sums[i] = acc[i / N][i % N]; });
    for (int k = 0; k < words; k++) {
        vu wv[N];
        int64_t next = ahead.words + (k * step < end ? 0 : ahead.jump);
        unrolled<N>([&](auto n) SYLVAN_INLINE {
            const uint32_t* p = w + n * ws + k * step;
            wv[n] = load<vu>(p);
            if (ahead.words) __builtin_prefetch(p + next, 0, 2);
        });
        unrolled<M>([&](auto m) SYLVAN_INLINE {
            vu xv = repeated(x + m * xs + k);
            unrolled<N>([&](auto n) SYLVAN_INLINE {
                sums[m * N + n] = E::dot(sums[m * N + n], wv[n], xv);
            });
        });
    }
    unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i / N][i % N] = sums[i]; });
}
