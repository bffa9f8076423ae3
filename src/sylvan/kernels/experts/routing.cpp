// Which experts a row goes to, with what share; and the order in which the experts take the rows.
#include "../matmul/levels.h"
#include "../matmul/tiling.h"
#include <cmath>
#include <limits>

namespace {

enum class Scores { SOFTMAX, SOFTMAX_CHOSEN, SIGMOID, SPARSE_MIXER };
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Chosen {  // experts of a row, the best first until they are sorted
    int count = 0;
    int32_t id[MAX_CHOSEN];
    float rank[MAX_CHOSEN];

    // Among equals the first stays ahead; whatever the ranks are, NaN included, `most` different ones are kept.
    void offer(int32_t expert, float value, int most) {
        if (count == most && !(value > rank[most - 1])) return;
        int i = count < most ? count++ : most - 1;
        for (; i > 0 && value > rank[i - 1]; i--) id[i] = id[i - 1], rank[i] = rank[i - 1];
        id[i] = expert, rank[i] = value;
    }
};

float softmax(const float* logits, float* scores, int count) {  // not divided by the sum, which is returned
    float top = LOWEST, total = 0.f;
    for (int i = 0; i < count; i++) top = std::max(top, logits[i]);
    for (int i = 0; i < count; i += LANES) {
        vf e = first(exp(load<vf>(logits + i) - top), count - i);
        store(scores + i, e);
        total += sum(e);
    }
    return total;
}

// buf: logits f32, bias of the choice f32 or none, experts i32 [rows][chosen], shares f32 [rows][chosen]
// n: experts, chosen, scores, normalised, groups, groups kept, experts that rank a group; f: scale, jitter of SparseMixer
struct Router {
    const Op& op;
    const float *logits, *bias;
    int experts, most;
    alignas(64) float score[MAX_EXPERTS + LANES], rank[MAX_EXPERTS + LANES];
    Chosen chosen;

    Router(const Op& op, const Step& s, int64_t r)
        : op(op), logits(at<float>(op, s, 0) + r * stride(op.n[0])), bias(at<float>(op, s, 1)), experts(op.n[0]), most(op.n[1]) {}
    Scores scores() const { return Scores(op.n[2]); }

    void score_all() {
        if (scores() == Scores::SIGMOID)
            for (int i = 0; i < experts; i += LANES) store(score + i, 1.f / (exp(-load<vf>(logits + i)) + 1.f));
        else {
            vf total = splat(softmax(logits, score, experts));
            for (int i = 0; i < experts; i += LANES) store(score + i, load<vf>(score + i) / total);
        }
        for (int i = 0; i < experts; i++) rank[i] = bias ? score[i] + bias[i] : score[i];
    }
    void keep_groups() {
        int groups = op.n[4], size = experts / groups;
        Chosen kept;
        for (int g = 0; g < groups; g++) {
            Chosen best;
            for (int i = 0; i < size; i++) best.offer(i, rank[g * size + i], op.n[6]);
            float total = 0.f;
            for (int i = 0; i < best.count; i++) total += best.rank[i];
            kept.offer(g, total, op.n[5]);
        }
        for (int g = 0; g < groups; g++)
            if (std::find(kept.id, kept.id + kept.count, g) == kept.id + kept.count) std::fill_n(rank + g * size, size, LOWEST);
    }
    void weigh_scores(float* share) {  // by expert, so that the sum's order is that of the numbers
        if (op.n[4] > 1) keep_groups();
        for (int i = 0; i < experts; i++) chosen.offer(i, rank[i], most);
        std::sort(chosen.id, chosen.id + most);
        float total = 1e-20f;
        for (int k = 0; k < most; k++) total += share[k] = score[chosen.id[k]];
        for (int k = 0; k < most; k++) share[k] = (op.n[3] ? share[k] / total : share[k]) * op.f[0];
    }
    void weigh_chosen(float* share) {  // a softmax over the chosen logits only
        for (int i = 0; i < experts; i++) chosen.offer(i, logits[i], most);
        float top = chosen.rank[0], total = 0.f;
        std::sort(chosen.id, chosen.id + most);
        for (int k = 0; k < most; k++) total += share[k] = exp1(logits[chosen.id[k]] - top);
        for (int k = 0; k < most; k++) share[k] = share[k] / total * op.f[0];
    }
    void mix(float* share) {  // the best, then the best of the others, each weighed against those close to it
        std::copy_n(logits, experts, rank);
        for (int k = 0; k < most; k++) {
            int best = int(std::max_element(rank, rank + experts) - rank);
            float top = rank[best], total = 0.f;
            for (int i = 0; i < experts; i++) {
                bool far = (top - logits[i]) / std::max(std::abs(logits[i]), top) > 2.f * op.f[1];
                if (!far && rank[i] != LOWEST) total += exp1(rank[i] - top);
            }
            rank[best] = LOWEST;
            int at = k;  // sorted by number, the share beside it
            for (; at > 0 && chosen.id[at - 1] > best; at--) chosen.id[at] = chosen.id[at - 1], share[at] = share[at - 1];
            chosen.id[at] = best, share[at] = 1.f / total;
        }
    }
};

void route(const Op& op, const Step& s, int64_t r) {
    Router router(op, s, r);
    float* share = at<float>(op, s, 3) + r * op.n[1];
    if (router.scores() == Scores::SPARSE_MIXER) router.mix(share);
    else if (router.scores() == Scores::SOFTMAX_CHOSEN) router.weigh_chosen(share);
    else router.score_all(), router.weigh_scores(share);
    std::copy_n(router.chosen.id, op.n[1], at<int32_t>(op, s, 2) + r * op.n[1]);
}

// A pair is a row and one of its experts: row * chosen + k. Pairs get places, by expert and then by row.
// buf: experts of the pairs, load i64 [experts] (added to), pair of each place, place of each pair, groups (see tiling.h)
// n: experts, chosen
void align(const Op& op, const Step& s, int, void*) {
    const int32_t* id = at<int32_t>(op, s, 0);
    int64_t* load = at<int64_t>(op, s, 1);
    int32_t *pair = at<int32_t>(op, s, 2), *place = at<int32_t>(op, s, 3), *groups = at<int32_t>(op, s, 4);
    int pairs = rows(op, s) * op.n[1], next[MAX_EXPERTS] = {}, start = 0;
    for (int p = 0; p < pairs; p++) next[id[p]]++;
    int32_t* group = groups + 1;
    for (int e = 0; e < op.n[0]; e++) {
        int count = next[e];
        load[e] += count;
        next[e] = start;
        for (int i = 0; i < count; i += LINEAR_ROWS, group += 3)
            group[0] = e, group[1] = start + i, group[2] = std::min(LINEAR_ROWS, count - i);
        start += count;
    }
    groups[0] = int(group - groups - 1) / 3;
    for (int p = 0; p < pairs; p++) pair[place[p] = next[id[p]]++] = p;
}
int one_tile(const Op&, const Step&) { return 1; }

// buf: x, pair of each place, out, shares of the pairs or none: then they scale what is read, and see levels.h
// n: cols, chosen
template <class T> void gather_rows(const Op& op, const Step& s, int64_t r) {
    int64_t width = stride(op.n[0]);
    int32_t pair = at<int32_t>(op, s, 1)[r];
    const T* x = at<T>(op, s, 0) + pair / op.n[1] * width;
    T* out = at<T>(op, s, 2) + r * width;
    const float* shares = at<float>(op, s, 3);
    if (!shares) memcpy(out, x, width * sizeof(T));
    else
        for (int i = 0; i < width; i += LANES) put(out + i, get(x + i) * shares[pair]);
    quantise_row(op, s, r, out);
}

// Rows that were quantised before they are gathered: once each, however many experts they go to.
// buf: levels, scales, sums i32 or none, pair of each place, then the places' levels, scales and sums
// n: bytes of a row of levels, chosen, groups of a row
void gather_levels(const Op& op, const Step& s, int64_t r) {
    int64_t from = at<int32_t>(op, s, 3)[r] / op.n[1], bytes = op.n[0], groups = op.n[2];
    memcpy(at<uint8_t>(op, s, 4) + r * bytes, at<uint8_t>(op, s, 0) + from * bytes, bytes);
    at<float>(op, s, 5)[r] = at<float>(op, s, 1)[from];
    if (const int32_t* sums = at<int32_t>(op, s, 2)) memcpy(at<int32_t>(op, s, 6) + r * groups, sums + from * groups, groups * 4);
}

// The outputs of a row's experts, added in the order of their numbers.
// buf: outputs by place, place of each pair, out, shares of the pairs or none; n: cols, chosen
template <class T> void expert_sum(const Op& op, const Step& s, int64_t r) {
    int64_t width = stride(op.n[0]);
    int chosen = op.n[1];
    const int32_t* place = at<int32_t>(op, s, 1) + r * chosen;
    const float* shares = at<float>(op, s, 3);
    T* out = at<T>(op, s, 2) + r * width;
    for (int i = 0; i < width; i += LANES) {
        vf total{};
        for (int k = 0; k < chosen; k++) {
            float share = shares ? shares[r * chosen + k] : 1.f;
            total = fma(get(at<T>(op, s, 0) + place[k] * width + i), splat(share), total);
        }
        put(out + i, total);
    }
}

}  // namespace

const Kernel route_kernel[2] = {{row_tiles, by_rows<route>}, {row_tiles, by_rows<route>}};
const Kernel align_kernel[2] = {{one_tile, align}, {one_tile, align}};
const Kernel gather_kernel[2] = {{row_tiles, by_rows<gather_rows<bf16>>}, {row_tiles, by_rows<gather_rows<float>>}};
const Kernel gather_levels_kernel[2] = {{row_tiles, by_rows<gather_levels>}, {row_tiles, by_rows<gather_levels>}};
const Kernel expert_sum_kernel[2] = {{row_tiles, by_rows<expert_sum<bf16>>}, {row_tiles, by_rows<expert_sum<float>>}};
