// Collectives between the ranks of one machine: ops of programs, and functions.
#include "shared_ranks.h"

namespace {
namespace collective {

// Reads an operand that is float32 if `f32`, else T as the rows are.
template <class T> vf read(Buf<void> x, const Step& s, bool f32, int64_t i) {
    return f32 ? get(at<float>(x, s) + i) : get(at<T>(x, s) + i);
}
template <class T> void write(Buf<void> out, const Step& s, bool f32, int64_t i, vf v) {
    if (f32)
        put(at<float>(out, s) + i, v);
    else
        put(at<T>(out, s) + i, v);
}

template <class T> void all_reduce(const AllReduce& op, const Step& s, int, void*) {
    Ranks ranks = of(op.ranks, s);
    int64_t width = stride(op.cols);
    int64_t at_a_time = ranks.capacity() / static_cast<int64_t>(sizeof(float)) / width;
    int64_t count = rows(op, s);
    const float* bias = at(op.bias, s);
    for (int64_t first = 0; first < count && !ranks.is_lost(); first += at_a_time) {
        int64_t n = std::min(at_a_time, count - first);
        float* buffer = reinterpret_cast<float*>(ranks.begin());
        for (int64_t i = 0; i < n * width; i += LANES) {
            put(buffer + i, read<T>(op.x, s, op.x_f32, first * width + i));
        }
        if (ranks.meet_or_lose()) return;
        for (int64_t r = 0; r < n; r++) {
            const float* parts[MAX_RANKS];
            for (int other = 0; other < ranks.size(); other++) {
                parts[other] = reinterpret_cast<const float*>(ranks.buffer(other)) + r * width;
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
        float* buffer = reinterpret_cast<float*>(ranks.begin());
        for (int64_t r = 0; r < n; r++) {
            const float* row = x + (first + r) * x_width;
            std::copy(row, row + op.own_cols, buffer + r * op.share);
        }
        if (ranks.meet_or_lose()) return;
        for (int64_t r = 0; r < n; r++) {
            float* row = out + (first + r) * out_width;
            for (int other = 0; other < ranks.size(); other++) {
                int64_t column = int64_t(other) * op.share;
                int64_t own = std::clamp<int64_t>(op.cols - column, 0, op.share);
                const float* part = reinterpret_cast<const float*>(ranks.buffer(other));
                std::copy(part + r * op.share, part + r * op.share + own, row + column);
            }
            std::fill(row + op.cols, row + out_width, 0.0f);
        }
    }
}

}  // namespace collective
}  // namespace

// Bytes of the shared memory of `size` ranks with buffers of `capacity` bytes. It starts as zeros.
SYLVAN_API int64_t sylvan_ranks_bytes(int size, int64_t capacity) {
    return collective::Ranks::heads_bytes(size) + 2 * size * capacity;
}

SYLVAN_API void sylvan_ranks_close(char* memory, int rank, int size, int64_t capacity) {
    collective::Ranks(memory, rank, size, capacity, 0).close();
}

// Returns the result of a failed collective within a program (see `Ranks::meet`), or 0.
SYLVAN_API int sylvan_ranks_lost(char* memory, int rank, int size, int64_t capacity) {
    return collective::Ranks(memory, rank, size, capacity, 0).is_lost();
}

// Gather the `bytes` of every rank into `out`, in rank order. Returns as `collective::Ranks::meet`.
SYLVAN_API int sylvan_ranks_gather(char* memory, int rank, int size, int64_t capacity,
                                   double timeout_s, const char* in, char* out, int64_t bytes) {
    collective::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t done = 0;
    do {
        int64_t part = std::min(capacity, bytes - done);
        memcpy(ranks.begin(), in + done, part);
        if (int lost = ranks.meet()) return lost;
        for (int r = 0; r < size; r++) memcpy(out + r * bytes + done, ranks.buffer(r), part);
        done += part;
    } while (done < bytes);
    return 0;
}

// All-to-all: `in` holds `bytes` for each rank; `out` gets those for this rank, in rank order.
SYLVAN_API int sylvan_ranks_exchange(char* memory, int rank, int size, int64_t capacity,
                                     double timeout_s, const char* in, char* out, int64_t bytes) {
    collective::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t most = capacity / size;
    int64_t done = 0;
    do {
        int64_t part = std::min(most, bytes - done);
        char* buffer = ranks.begin();
        for (int r = 0; r < size; r++) memcpy(buffer + r * part, in + r * bytes + done, part);
        if (int lost = ranks.meet()) return lost;
        for (int r = 0; r < size; r++) {
            memcpy(out + r * bytes + done, ranks.buffer(r) + rank * part, part);
        }
        done += part;
    } while (done < bytes);
    return 0;
}

// Sums `count` numbers `x` over all ranks, in place; every rank gets the same bits.
SYLVAN_API int sylvan_ranks_sum(char* memory, int rank, int size, int64_t capacity,
                                double timeout_s, float* x, int64_t count) {
    collective::Ranks ranks(memory, rank, size, capacity, timeout_s);
    int64_t most = capacity / static_cast<int64_t>(sizeof(float));
    int64_t done = 0;
    do {
        int64_t part = std::min(most, count - done);
        memcpy(ranks.begin(), x + done, part * sizeof(float));
        if (int lost = ranks.meet()) return lost;
        const float* parts[collective::MAX_RANKS];
        for (int r = 0; r < size; r++) parts[r] = reinterpret_cast<const float*>(ranks.buffer(r));
        float* out = x + done;
        collective::tree_sum(parts, size, part, [&](int64_t first, int64_t n, const float* sums) {
            std::copy(sums, sums + n, out + first);
        });
        done += part;
    } while (done < count);
    return 0;
}

const Kernel all_reduce_kernel[2] = {
    tiled<collective::one_tile<AllReduce>, collective::all_reduce<bf16>>,
    tiled<collective::one_tile<AllReduce>, collective::all_reduce<float>>,
};
const Kernel all_gather_kernel[2] = {
    tiled<collective::one_tile<AllGather>, collective::all_gather<bf16>>,
    tiled<collective::one_tile<AllGather>, collective::all_gather<float>>,
};
