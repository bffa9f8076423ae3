// Detects the instruction sets of this CPU and its operating system. Only the portable library has
// this function, because the code must run on the base architecture.
#include "program.h"
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {
#if defined(__x86_64__)
uint64_t enabled_state() {  // XCR0: what the operating system saves on a context switch
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(feature, &value, &size, nullptr, 0) && value;
}
#endif
}  // namespace

// Bits: 0 avx2 + fma, 1 avx512 (f bw dq vl), 2 avx512-vnni, 3 avx512-bf16, 4 amx (tile, int8,
// bf16), 5 avx-vnni, 6 dotprod, 7 bf16 of ARM.
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
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long DOT = 1ul << 20, BF16 = 1ul << 14;  // HWCAP_ASIMDDP, HWCAP2_BF16
    return (getauxval(AT_HWCAP) & DOT ? 64 : 0) | (getauxval(AT_HWCAP2) & BF16 ? 128 : 0);
#elif defined(__aarch64__) && defined(__APPLE__)
    bool dot = has("hw.optional.arm.FEAT_DotProd"), pairs = has("hw.optional.arm.FEAT_BF16");
    return (dot ? 64 : 0) | (pairs ? 128 : 0);
#else
    return 0;
#endif
}
