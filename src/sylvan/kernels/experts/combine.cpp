// Sums the outputs of each row's experts over ranks that hold different experts.
#include "../collective/shared_ranks.h"

namespace {
namespace collective {

// Adds the results of the `width` ranks of a group for a pair, in the order of `tree_sum`.
template <class T> vf made_by(const Ranks& ranks, int group, int width, int64_t at) {
    vf parts[MAX_RANKS];
    for (int i = 0; i < width; i++) {
        parts[i] = get(reinterpret_cast<const T*>(ranks.buffer(group * width + i)) + at);
    }
    for (int left = width; left > 1; left = (left + 1) / 2) {
        for (int i = 0; i < left / 2; i++) parts[i] = parts[2 * i] + parts[2 * i + 1];
        if (left % 2) parts[left / 2] = parts[left - 1];
    }
    return parts[0];
}

// The rows that rank `r` sums, if `n` rows are divided among the ranks.
struct Share {
    int64_t from, to;
    Share(int64_t n, int r, int size) {
        int64_t each = (n + size - 1) / size;
        from = std::min(r * each, n);
        to = std::min(from + each, n);
    }
};

// Sends the sums of this rank's rows to the other ranks, and receives theirs. False: a rank is
// lost.
template <class T> bool exchange_sums(Ranks& ranks, T* out, int64_t n, int64_t width) {
    T* buffer = reinterpret_cast<T*>(ranks.begin());
    Share own(n, ranks.rank(), ranks.size());
    std::copy(out + own.from * width, out + own.to * width, buffer + own.from * width);
    if (ranks.meet_or_lose()) return false;
    for (int other = 0; other < ranks.size(); other++) {
        if (other == ranks.rank()) continue;
        Share share(n, other, ranks.size());
        const T* sums = reinterpret_cast<const T*>(ranks.buffer(other));
        std::copy(sums + share.from * width, sums + share.to * width, out + share.from * width);
    }
    return true;
}

// Rows are exchanged in batches; pair p of a batch is at p * width in the buffers of its ranks.
template <class T> void expert_combine(const ExpertCombine& op, const Step& s, int, void*) {
    Ranks ranks = of(op.ranks, s);
    int64_t width = stride(op.cols);
    int64_t chosen = op.top_k;
    int64_t count = rows(op, s);
    int64_t at_a_time = ranks.capacity() / static_cast<int64_t>(sizeof(T)) / (width * chosen);
    const T* x = at<T>(op.x, s);
    T* out = at<T>(op.out, s);
    const float* weights = at(op.weights, s);
    for (int64_t first = 0; first < count && !ranks.is_lost(); first += at_a_time) {
        int64_t n = std::min(at_a_time, count - first);
        const int32_t* place = at(op.pair_places, s) + first * chosen;
        const int32_t* owner = at(op.owners, s) + first * chosen;
        T* buffer = reinterpret_cast<T*>(ranks.begin());
        for (int64_t p = 0; p < n * chosen; p++) {
            if (place[p] >= 0) memcpy(buffer + p * width, x + place[p] * width, width * sizeof(T));
        }
        if (ranks.meet_or_lose()) return;
        Share mine(n, op.by_share ? ranks.rank() : 0, op.by_share ? ranks.size() : 1);
        for (int64_t r = mine.from; r < mine.to; r++) {
            const float* weight = weights ? weights + (first + r) * chosen : nullptr;
            for (int64_t i = 0; i < width; i += LANES) {
                vf total{};
                for (int64_t p = r * chosen; p < (r + 1) * chosen; p++) {
                    float share = weight ? weight[p - r * chosen] : 1.f;
                    vf made = made_by<T>(ranks, owner[p], op.width, p * width + i);
                    total = fma(made, splat(share), total);
                }
                put(out + (first + r) * width + i, total);
            }
        }
        if (op.by_share && !exchange_sums(ranks, out + first * width, n, width)) return;
    }
}

}  // namespace collective
}  // namespace

const Kernel expert_combine_kernel[2] = {
    tiled<collective::one_tile<ExpertCombine>, collective::expert_combine<bf16>>,
    tiled<collective::one_tile<ExpertCombine>, collective::expert_combine<float>>,
};
