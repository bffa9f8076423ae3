// Collectives between the ranks of one machine, over shared memory.
//
// Each rank has a header and two buffers. Collective number n writes into buffer n % 2 of its own
// rank, publishes its number, and waits for the numbers of the others. A buffer is reused two
// collectives later: by then all others have published the number in between, so they have read it.
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
namespace meeting {

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
constexpr int64_t ROOM_ALIGN = 4096;
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
        : heads_(reinterpret_cast<RankHead*>(memory)),
          rooms_(memory + heads_bytes(size)),
          rank_(rank),
          size_(size),
          capacity_(capacity),
          timeout_s_(timeout_s) {}

    static int64_t heads_bytes(int size) {
        int64_t bytes = size * static_cast<int64_t>(sizeof(RankHead));
        return (bytes + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;
    }

    int size() const { return size_; }
    int rank() const { return rank_; }
    int64_t capacity() const { return capacity_; }

    // Begin the next collective: this rank's room for it.
    char* begin() {
        number_ = heads_[rank_].number.load(std::memory_order_relaxed) + 1;
        return room(rank_);
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

    char* room(int rank) const { return rooms_ + (2 * rank + number_ % 2) * capacity_; }

    // The same within a program, which cannot return: later collectives see that one has failed.
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
    char* rooms_;
    int rank_;
    int size_;
    int64_t capacity_;
    double timeout_s_;
    uint32_t number_ = 0;
};

// Neighbours in pairs, then pairs of pairs; the last of an odd number is added later. Calls
// `take(first, n, sums)` for blocks of columns.
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
    return Ranks(memory, m.rank, m.size, m.room_bytes, m.timeout_s);
}

// A collective is one tile: one thread runs it while the others wait for the next op.
template <class O> int one_tile(const O& op, const Step& s) { return rows(op, s) > 0; }

// Numbers that are float32 beside rows of type T.
template <class T> vf read(Buf<void> x, const Step& s, bool f32, int64_t i) {
    return f32 ? get(at<float>(x, s) + i) : get(at<T>(x, s) + i);
}
template <class T> void write(Buf<void> out, const Step& s, bool f32, int64_t i, vf v) {
    if (f32) put(at<float>(out, s) + i, v);
    else put(at<T>(out, s) + i, v);
}

template <class T> void all_reduce(const AllReduce& op, const Step& s, int, void*) {
    Ranks ranks = of(op.ranks, s);
    int64_t width = stride(op.cols);
    int64_t at_a_time = ranks.capacity() / static_cast<int64_t>(sizeof(float)) / width;
    int64_t count = rows(op, s);
    const float* bias = at(op.bias, s);
    for (int64_t first = 0; first < count && !ranks.is_lost(); first += at_a_time) {
        int64_t n = std::min(at_a_time, count - first);
        float* room = reinterpret_cast<float*>(ranks.begin());
        for (int64_t i = 0; i < n * width; i += LANES) {
            put(room + i, read<T>(op.x, s, op.x_f32, first * width + i));
        }
        if (ranks.meet_or_lose()) return;
        for (int64_t r = 0; r < n; r++) {
            const float* parts[MAX_RANKS];
            for (int other = 0; other < ranks.size(); other++) {
                parts[other] = reinterpret_cast<const float*>(ranks.room(other)) + r * width;
            }
            int64_t row = (first + r) * width;
            tree_sum(parts, ranks.size(), width, [&](int64_t column, int64_t m, const float* sums) {
                for (int64_t i = 0; i < m; i += LANES) {
                    vf total = get(sums + i);
                    if (bias) total += get(bias + column + i);
                    write<T>(op.out, s, op.out_f32, row + column + i, total);
                }
            });
        }
    }
}

template <class T> void all_gather(const AllGather& op, const Step& s, int, void*) {
    Ranks ranks = of(op.ranks, s);
    int64_t x_width = stride(op.own_cols);
    int64_t out_width = stride(op.cols);
    int64_t at_a_time = ranks.capacity() / static_cast<int64_t>(sizeof(float)) / op.share;
    int64_t count = rows(op, s);
    const float* x = at(op.x, s);
    float* out = at(op.out, s);
    for (int64_t first = 0; first < count && !ranks.is_lost(); first += at_a_time) {
        int64_t n = std::min(at_a_time, count - first);
        float* room = reinterpret_cast<float*>(ranks.begin());
        for (int64_t r = 0; r < n; r++) {
            const float* row = x + (first + r) * x_width;
            std::copy(row, row + op.own_cols, room + r * op.share);
        }
        if (ranks.meet_or_lose()) return;
        for (int64_t r = 0; r < n; r++) {
            float* row = out + (first + r) * out_width;
            for (int other = 0; other < ranks.size(); other++) {
                int64_t column = int64_t(other) * op.share;
                int64_t own = std::clamp<int64_t>(op.cols - column, 0, op.share);
                const float* part = reinterpret_cast<const float*>(ranks.room(other));
                std::copy(part + r * op.share, part + r * op.share + own, row + column);
            }
            std::fill(row + op.cols, row + out_width, 0.0f);
        }
    }
}

}  // namespace meeting
}  // namespace

// Bytes of the shared memory of `size` ranks with buffers of `capacity` bytes. It starts as zeros.
SYLVAN_API int64_t sylvan_ranks_bytes(int size, int64_t capacity) {
    return meeting::Ranks::heads_bytes(size) + 2 * size * capacity;
}

SYLVAN_API void sylvan_ranks_close(char* memory, int rank, int size, int64_t capacity) {
    meeting::Ranks(memory, rank, size, capacity, 0).close();
}

// The result of a failed collective within a program: see `Ranks::meet`.
SYLVAN_API int sylvan_ranks_lost(char* memory, int rank, int size, int64_t capacity) {
    return meeting::Ranks(memory, rank, size, capacity, 0).is_lost();
}

// Gather the `bytes` of every rank into `out`, in rank order. Returns as `meeting::Ranks::meet`.
SYLVAN_API int sylvan_ranks_gather(char* memory, int rank, int size, int64_t capacity,
                                   double timeout_s, const char* in, char* out, int64_t bytes) {
    meeting::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t done = 0;
    do {
        int64_t part = std::min(capacity, bytes - done);
        memcpy(ranks.begin(), in + done, part);
        if (int lost = ranks.meet()) return lost;
        for (int r = 0; r < size; r++) memcpy(out + r * bytes + done, ranks.room(r), part);
        done += part;
    } while (done < bytes);
    return 0;
}

// `bytes` for each rank lie in `in`; those for this one, from every rank, go to `out`.
SYLVAN_API int sylvan_ranks_exchange(char* memory, int rank, int size, int64_t capacity,
                                     double timeout_s, const char* in, char* out, int64_t bytes) {
    meeting::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t most = capacity / size;
    int64_t done = 0;
    do {
        int64_t part = std::min(most, bytes - done);
        char* room = ranks.begin();
        for (int r = 0; r < size; r++) memcpy(room + r * part, in + r * bytes + done, part);
        if (int lost = ranks.meet()) return lost;
        for (int r = 0; r < size; r++) {
            memcpy(out + r * bytes + done, ranks.room(r) + rank * part, part);
        }
        done += part;
    } while (done < bytes);
    return 0;
}

// The sum of all ranks' `x`, of `count` numbers, in place; the same bits on every rank.
SYLVAN_API int sylvan_ranks_sum(char* memory, int rank, int size, int64_t capacity,
                                double timeout_s, float* x, int64_t count) {
    meeting::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t most = capacity / static_cast<int64_t>(sizeof(float));
    int64_t done = 0;
    do {
        int64_t part = std::min(most, count - done);
        memcpy(ranks.begin(), x + done, part * sizeof(float));
        if (int lost = ranks.meet()) return lost;
        const float* parts[meeting::MAX_RANKS];
        for (int r = 0; r < size; r++) parts[r] = reinterpret_cast<const float*>(ranks.room(r));
        float* out = x + done;
        meeting::tree_sum(parts, size, part, [&](int64_t first, int64_t n, const float* sums) {
            std::copy(sums, sums + n, out + first);
        });
        done += part;
    } while (done < count);
    return 0;
}

const Kernel all_reduce_kernel[2] = {
    tiled<meeting::one_tile<AllReduce>, meeting::all_reduce<bf16>>,
    tiled<meeting::one_tile<AllReduce>, meeting::all_reduce<float>>,
};
const Kernel all_gather_kernel[2] = {
    tiled<meeting::one_tile<AllGather>, meeting::all_gather<bf16>>,
    tiled<meeting::one_tile<AllGather>, meeting::all_gather<float>>,
};
