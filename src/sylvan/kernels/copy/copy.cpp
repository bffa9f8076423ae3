// Copies pages to and from other memory, and the first bytes of pages into other pages.
#include "../native/pool.h"
#include <algorithm>
#include <cstring>

namespace {

char* page_bytes(const PagedBytes& m, int64_t region, int64_t page) {
    return m.memory + region * m.region_step + page * m.page_step;
}

// Work is divided by blocks of a page: one thread copies the same block of all copies in order, so
// a copy may read a page that a later copy writes.
// FEW_BYTES: the calling thread copies this much before helper threads would wake up
constexpr int64_t COPY_BLOCK = 16 << 10, FEW_BYTES = 256 << 10;

struct PageCopies {
    const PagedBytes& memory;
    const int64_t (*copies)[3];
    int64_t count;
    std::atomic<int64_t> next;

    int64_t blocks() const { return (memory.width + COPY_BLOCK - 1) / COPY_BLOCK; }
    void block(int64_t index) const {
        int64_t region = index / blocks(), begin = index % blocks() * COPY_BLOCK;
        for (int64_t i = 0; i < count; i++) {
            int64_t bytes = std::min(copies[i][2] - begin, COPY_BLOCK);
            if (bytes > 0)
                memcpy(page_bytes(memory, region, copies[i][1]) + begin,
                       page_bytes(memory, region, copies[i][0]) + begin, bytes);
        }
    }
    void run() {
        for (int64_t i;
             (i = next.fetch_add(1, std::memory_order_relaxed)) < memory.regions * blocks();)
            block(i);
    }
};

}  // namespace

// Gathers pages, each with all its regions, into `out`; runs on the calling thread.
SYLVAN_API void sylvan_gather_pages(const PagedBytes* memory, const int64_t* pages, int64_t count,
                                    char* out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < memory->regions; r++, out += memory->width)
            memcpy(out, page_bytes(*memory, r, pages[i]), memory->width);
}

// Scatters `in` into pages: the inverse of `sylvan_gather_pages`.
SYLVAN_API void sylvan_scatter_pages(const PagedBytes* memory, const int64_t* pages, int64_t count,
                                     const char* in) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < memory->regions; r++, in += memory->width)
            memcpy(page_bytes(*memory, r, pages[i]), in, memory->width);
}

// For each (source, target, bytes), copies the first bytes of a page into another page, in each
// region. The result is as if the copies ran one after another.
SYLVAN_API void sylvan_copy_pages(const PagedBytes* memory, const int64_t (*copies)[3],
                                  int64_t count) {
    PageCopies work{*memory, copies, count, 0};
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += copies[i][2] * memory->regions;
    Pool& pool = Pool::shared();
    if (bytes <= FEW_BYTES || pool.size() == 1) return work.run();
    std::lock_guard lock(pool.busy);
    pool.run([](void* arg, int) { static_cast<PageCopies*>(arg)->run(); }, &work);
}
