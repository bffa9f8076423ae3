// Reads memory with the threads of kernels: the bandwidth that benchmarks compare with.
#include "kernel.h"
#include "pool.h"

namespace {

struct Reading {
    const uint32_t* data;
    int64_t words;
    std::atomic<int64_t> next;
    std::atomic<uint32_t> sum;
};

void read_blocks(void* arg, int) {
    // words; several streams, as a linear reads
    constexpr int64_t BLOCK = 1 << 16, STREAMS = 4, EACH = BLOCK / STREAMS;
    auto& r = *static_cast<Reading*>(arg);
    vu total{};
    for (int64_t at; (at = r.next.fetch_add(BLOCK)) + BLOCK <= r.words;)
        for (int64_t i = 0; i < EACH; i += LANES)
            for (int64_t s = 0; s < STREAMS; s++) {
                const uint32_t* p = r.data + at + s * EACH + i;
                __builtin_prefetch(p + 512);
                total ^= load<vu>(p);
            }
    uint32_t lane = 0;
    for (int i = 0; i < LANES; i++) lane ^= total[i];
    r.sum ^= lane;
}

}  // namespace

// reads everything once, with all threads
SYLVAN_API uint32_t sylvan_read(const void* data, int64_t bytes) {
    Reading r{static_cast<const uint32_t*>(data), bytes / 4, 0, 0};
    Pool& pool = Pool::shared();
    std::lock_guard lock(pool.busy);
    pool.run(read_blocks, &r);
    return r.sum;
}
