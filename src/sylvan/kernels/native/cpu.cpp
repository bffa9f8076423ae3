// Which instruction sets this CPU and its operating system offer. Only the portable library is asked, so nothing here
// may be compiled for more than the base architecture.
#include "program.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {
#if defined(__x86_64__)
uint64_t enabled_state() {  // XCR0: what the operating system saves on a context switch
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}
#endif
}  // namespace

// Bits: 0 avx2 + fma, 1 avx512 (f bw dq vl), 2 avx512-vnni, 3 avx512-bf16, 4 amx (tile, int8, bf16),
// 5 avx-vnni.
SYLVAN_API int sylvan_cpu() {
#if defined(__x86_64__)
    uint32_t a, b, c, d, bits = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
    uint32_t fma = c >> 12 & 1;
    uint64_t state = enabled_state();
    bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state >> 17 & 3) == 3;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (ymm && fma && (b >> 5 & 1)) bits |= 1;
    if (zmm && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1)) bits |= 2;
    if (bits & 2 && (c >> 11 & 1)) bits |= 4;
    if (tiles && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1)) bits |= 16;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        if (bits & 2 && (a >> 5 & 1)) bits |= 8;
        if (bits & 1 && (a >> 4 & 1)) bits |= 32;
    }
    return int(bits);
#else
    return 0;
#endif
}
