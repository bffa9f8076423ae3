#include "amx.h"
#include "program.h"
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

SYLVAN_API int sylvan_start() {  // requests AMX from the kernel; 0 if available
#if defined(__AMX_BF16__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : 1;
#else
    return 0;
#endif
}

void configure_tiles() {
#if defined(__AMX_BF16__)
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = TILE;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
#endif
}

void release_tiles() {
#if defined(__AMX_BF16__)
    asm volatile("tilerelease");
#endif
}
