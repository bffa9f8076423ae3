// Matrix tiles (Intel AMX): 16 rows of 64 bytes each. B tiles are 16 words of 16 columns, just as
// weights, keys and values are packed for the other instruction sets, so the layouts are the same.
#pragma once
#include "vec.h"

// Configures tiles (16 x 64 bytes each) for the calling thread, and releases them; a no-op without
// AMX. A thread that also runs other libraries must configure each time, because they change the
// tile configuration.
void configure_tiles();
void release_tiles();

#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
constexpr int TILE = 16;        // rows, and 32-bit columns
constexpr int TILE_WORDS = 16;  // words of K in a step: 32 bf16 or 64 int8

// The compiler's own intrinsics do not declare that they read memory, so it may move stores behind
// them.
template <int T> static inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> static inline void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> static inline void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
struct TilesBf16 {  // tile C += tile A * tile B
    template <int C, int A, int B> static inline void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};
struct TilesInt8 {
    template <int C, int A, int B> static inline void dot() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};
static inline void zero_four() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
}
static inline void store_four(float* out) {
    tile_store<0>(out, 64);
    tile_store<1>(out + 256, 64);
    tile_store<2>(out + 512, 64);
    tile_store<3>(out + 768, 64);
}

// Tile loads wait for memory one after another unless their data was prefetched.
constexpr int BYTES_AHEAD = 2048;
template <int T, bool STREAM> static inline void tile_stream(const char* p) {
    if constexpr (STREAM)
        for (int line = 0; line < TILE; line++) __builtin_prefetch(p + BYTES_AHEAD + line * 64);
    tile_load<T>(p, 64);
}

// out = x . w over `steps` tiles of K; rows of x are `xs` bytes apart, blocks of 16 columns of w
// are `ws` apart. STREAM: w comes from memory.
template <class D, bool STREAM> static inline void tiles_2x2(float* out, const char* x, int64_t xs,
                                                             const char* w, int64_t ws, int steps) {
    zero_four();
    for (int k = 0; k < steps; k++) {
        tile_load<4>(x + k * 64, xs);
        tile_stream<6, STREAM>(w + k * 1024);
        tile_stream<7, STREAM>(w + ws + k * 1024);
        tile_load<5>(x + 16 * xs + k * 64, xs);
        D::template dot<0, 4, 6>();
        D::template dot<1, 4, 7>();
        D::template dot<2, 5, 6>();
        D::template dot<3, 5, 7>();
    }
    store_four(out);
}
template <class D, bool STREAM> static inline void tiles_1x4(float* out, const char* x, int64_t xs,
                                                             const char* w, int64_t ws, int steps) {
    zero_four();
    for (int k = 0; k < steps; k++) {
        const char* p = w + k * 1024;
        tile_load<4>(x + k * 64, xs);
        tile_stream<5, STREAM>(p);
        tile_stream<6, STREAM>(p + ws);
        D::template dot<0, 4, 5>();
        D::template dot<1, 4, 6>();
        tile_stream<5, STREAM>(p + 2 * ws);
        tile_stream<6, STREAM>(p + 3 * ws);
        D::template dot<2, 4, 5>();
        D::template dot<3, 4, 6>();
    }
    store_four(out);
}
template <class D, bool STREAM> static inline void tiles_1x2(float* out, const char* x, int64_t xs,
                                                             const char* w, int64_t ws, int steps) {
    tile_zero<0>();
    tile_zero<1>();
    for (int k = 0; k < steps; k++) {
        tile_load<4>(x + k * 64, xs);
        tile_stream<6, STREAM>(w + k * 1024);
        tile_stream<7, STREAM>(w + ws + k * 1024);
        D::template dot<0, 4, 6>();
        D::template dot<1, 4, 7>();
    }
    tile_store<0>(out, 64);
    tile_store<1>(out + 256, 64);
}
template <class D, bool STREAM = false> static inline void
tiles_1x1(void* out, const char* x, int64_t xs, const char* w, int steps) {
    tile_zero<0>();
    for (int k = 0; k < steps; k++) {
        tile_load<4>(x + k * 64, xs);
        tile_stream<5, STREAM>(w + k * 1024);
        D::template dot<0, 4, 5>();
    }
    tile_store<0>(out, 64);
}
#else
constexpr bool HAS_TILES = false;
#endif
