// Synchronises the ranks of one machine over shared memory.
//
// Each rank has a header and two buffers. Collective number n writes into buffer n % 2 of its own
// rank, publishes its number, and waits for the numbers of the others. A buffer is reused two
// collectives later: by then all others have published the number in between, so they have read it.
#pragma once
#include "../native/kernel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {
namespace collective {

struct alignas(64) RankHead {
    std::atomic<uint32_t> number;    // number of the newest collective whose data is in its buffer
    std::atomic<uint32_t> sleepers;  // ranks that sleep until the number changes
    std::atomic<uint32_t> closed;
    // the result of `meet` for a failed collective within a program, else 0
    std::atomic<int32_t> lost;
};
static_assert(sizeof(RankHead) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

constexpr int MAX_RANKS = 64;
constexpr int64_t BUFFER_ALIGN = 4096;
constexpr int MEET_SPINS = 4000;  // some 50 microseconds: ranks of a step are rarely further apart
constexpr int64_t NAP_NS = 50'000'000;
constexpr int64_t SUM_BLOCK = 256;

void spin_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
    timespec nap{0, NAP_NS};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &nap, nullptr, 0);
#else
    (void)word;
    (void)value;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
    uint32_t* address = reinterpret_cast<uint32_t*>(&word);
    syscall(SYS_futex, address, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

class Ranks {
public:
    Ranks(char* memory, int rank, int size, int64_t capacity, double timeout_s)
        : heads_(reinterpret_cast<RankHead*>(memory)), buffers_(memory + heads_bytes(size)),
          rank_(rank), size_(size), capacity_(capacity), timeout_s_(timeout_s) {}

    static int64_t heads_bytes(int size) {
        int64_t bytes = size * static_cast<int64_t>(sizeof(RankHead));
        return (bytes + BUFFER_ALIGN - 1) / BUFFER_ALIGN * BUFFER_ALIGN;
    }

    int size() const { return size_; }
    int rank() const { return rank_; }
    int64_t capacity() const { return capacity_; }

    // Begin the next collective: this rank's buffer for it.
    char* begin() {
        number_ = heads_[rank_].number.load(std::memory_order_relaxed) + 1;
        return buffer(rank_);
    }

    // Publish that the buffer is filled, and wait for the others. Returns 0, or the number of a
    // rank + 1 (negative if it has closed); then nothing may be read.
    int meet() {
        RankHead& own = heads_[rank_];
        own.number.store(number_, std::memory_order_seq_cst);
        if (own.sleepers.load(std::memory_order_seq_cst) != 0) wake_all(own.number);
        for (int other = 0; other < size_; other++) {
            if (int lost = wait_for(other)) return lost;
        }
        return 0;
    }

    char* buffer(int rank) const { return buffers_ + (2 * rank + number_ % 2) * capacity_; }

    // As `meet`, but within a program, which cannot return: records the failure for later
    // collectives.
    int meet_or_lose() {
        int lost = meet();
        if (lost) heads_[rank_].lost.store(lost, std::memory_order_relaxed);
        return lost;
    }
    int is_lost() const { return heads_[rank_].lost.load(std::memory_order_relaxed); }

    void close() {
        heads_[rank_].closed.store(1, std::memory_order_seq_cst);
        wake_all(heads_[rank_].number);
    }

private:
    bool is_there(const RankHead& head) const {
        return static_cast<int32_t>(head.number.load(std::memory_order_acquire) - number_) >= 0;
    }

    int wait_for(int other) const {
        RankHead& head = heads_[other];
        for (int i = 0; i < MEET_SPINS; i++) {
            if (is_there(head)) return 0;
            spin_once();
        }
        using Clock = std::chrono::steady_clock;
        auto until = Clock::now() + std::chrono::duration<double>(timeout_s_);
        while (true) {
            head.sleepers.fetch_add(1, std::memory_order_seq_cst);
            uint32_t seen = head.number.load(std::memory_order_seq_cst);
            bool closed = head.closed.load(std::memory_order_seq_cst) != 0;
            bool there = is_there(head);
            if (!there && !closed) sleep_while(head.number, seen);
            head.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (there || is_there(head)) return 0;
            if (closed) return -(other + 1);
            if (Clock::now() > until) return other + 1;
        }
    }

    RankHead* heads_;
    char* buffers_;
    int rank_;
    int size_;
    int64_t capacity_;
    double timeout_s_;
    uint32_t number_ = 0;
};

// Sums neighbours in pairs, then pairs of pairs; an odd last one joins the next level. Calls
// `take(first, n, sums)` for each block of columns.
template <class F> void tree_sum(const float* const* parts, int size, int64_t count, F take) {
    alignas(64) float sums[(MAX_RANKS + 1) / 2][SUM_BLOCK];
    for (int64_t first = 0; first < count; first += SUM_BLOCK) {
        int64_t n = std::min(SUM_BLOCK, count - first);
        for (int pair = 0; pair < (size + 1) / 2; pair++) {
            const float* a = parts[2 * pair] + first;
            if (2 * pair + 1 == size) {
                std::copy(a, a + n, sums[pair]);
                continue;
            }
            const float* b = parts[2 * pair + 1] + first;
            for (int64_t i = 0; i < n; i++) sums[pair][i] = a[i] + b[i];
        }
        for (int left = (size + 1) / 2; left > 1; left = (left + 1) / 2) {
            for (int pair = 0; pair < (left + 1) / 2; pair++) {
                const float* a = sums[2 * pair];
                if (2 * pair + 1 == left) {
                    std::copy(a, a + n, sums[pair]);
                    continue;
                }
                const float* b = sums[2 * pair + 1];
                for (int64_t i = 0; i < n; i++) sums[pair][i] = a[i] + b[i];
            }
        }
        take(first, n, sums[0]);
    }
}

Ranks of(const RankMemory& m, const Step& s) {
    char* memory = reinterpret_cast<char*>(at(m.memory, s));
    return Ranks(memory, m.rank, m.size, m.buffer_bytes, m.timeout_s);
}

// A collective is one tile: one thread runs it while the others wait for the next op.
template <class O> int one_tile(const O& op, const Step& s) { return rows(op, s) > 0; }

}  // namespace collective
}  // namespace
