// Routing (moe_align): the experts and weights of each row, and the order in which experts process
// the rows.
#include "../matmul/levels.h"
#include "../matmul/tiling.h"
#include "../scan/scan.h"
#include <cmath>
#include <limits>

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Chosen {  // experts of a row, the best first until they are sorted
    int count = 0;
    int32_t id[MAX_CHOSEN];
    float rank[MAX_CHOSEN];

    // Ties go to the first expert. Always selects `most` different experts, even if scores are NaN.
    void offer(int32_t expert, float value, int most) {
        if (count == most && !(value > rank[most - 1])) return;
        int i = count < most ? count++ : most - 1;
        for (; i > 0 && value > rank[i - 1]; i--) {
            id[i] = id[i - 1];
            rank[i] = rank[i - 1];
        }
        id[i] = expert;
        rank[i] = value;
    }
};

// not divided by the sum, which is returned
float softmax(const float* logits, float* scores, int count) {
    float top = LOWEST, total = 0.f;
    for (int i = 0; i < count; i++) top = std::max(top, logits[i]);
    for (int i = 0; i < count; i += LANES) {
        vf e = first(exp(load<vf>(logits + i) - top), count - i);
        store(scores + i, e);
        total += sum(e);
    }
    return total;
}

struct Router {
    const Route& op;
    const float *logits, *bias;
    int experts, most;
    alignas(64) float score[MAX_EXPERTS + LANES], rank[MAX_EXPERTS + LANES];
    Chosen chosen;

    Router(const Route& op, const Step& s, int64_t r)
        : op(op), logits(at(op.logits, s) + r * stride(op.num_experts)), bias(at(op.bias, s)),
          experts(op.num_experts), most(op.top_k) {}

    void score_all() {
        if (op.scores == Scores::SIGMOID)
            for (int i = 0; i < experts; i += LANES)
                store(score + i, 1.f / (exp(-load<vf>(logits + i)) + 1.f));
        else if (op.scores == Scores::SQRT_SOFTPLUS) {
            for (int i = 0; i < experts; i += LANES)
                store(score + i, scans::softplus(load<vf>(logits + i)));
            for (int i = 0; i < experts; i++) score[i] = std::sqrt(score[i]);
        } else {
            vf total = splat(softmax(logits, score, experts));
            for (int i = 0; i < experts; i += LANES) store(score + i, load<vf>(score + i) / total);
        }
        for (int i = 0; i < experts; i++) rank[i] = bias ? score[i] + bias[i] : score[i];
    }
    void keep_groups() {
        int groups = op.groups, size = experts / groups;
        Chosen kept;
        for (int g = 0; g < groups; g++) {
            Chosen best;
            for (int i = 0; i < size; i++) best.offer(i, rank[g * size + i], op.group_rank);
            float total = 0.f;
            for (int i = 0; i < best.count; i++) total += best.rank[i];
            kept.offer(g, total, op.kept_groups);
        }
        for (int g = 0; g < groups; g++)
            if (std::find(kept.id, kept.id + kept.count, g) == kept.id + kept.count)
                std::fill_n(rank + g * size, size, LOWEST);
    }
    void choose_best() {
        if (op.groups > 1) keep_groups();
        for (int i = 0; i < experts; i++) chosen.offer(i, rank[i], most);
    }
    void choose_by_token(const Step& s, int64_t r) {
        int token = std::clamp(s.run->ids[r], 0, op.vocab_rows - 1);
        const float* ids = at(op.by_token, s) + token * stride(op.top_k);
        for (int k = 0; k < most; k++) chosen.id[k] = std::clamp(int(ids[k]), 0, experts - 1);
    }
    void weigh_scores(float* weight) {  // by expert id, so the order of the sum is fixed
        std::sort(chosen.id, chosen.id + most);
        float total = 1e-20f;
        for (int k = 0; k < most; k++) total += weight[k] = score[chosen.id[k]];
        for (int k = 0; k < most; k++)
            weight[k] = (op.normalise ? weight[k] / total : weight[k]) * op.scale;
    }
    void weigh_chosen(float* weight) {  // a softmax over the chosen logits only
        for (int i = 0; i < experts; i++) chosen.offer(i, logits[i], most);
        float top = chosen.rank[0], total = 0.f;
        std::sort(chosen.id, chosen.id + most);
        for (int k = 0; k < most; k++) total += weight[k] = exp1(logits[chosen.id[k]] - top);
        for (int k = 0; k < most; k++) weight[k] = weight[k] / total * op.scale;
    }
    // SparseMixer: the best expert, then the next; each weighted against scores close to it
    void mix(float* weight) {
        std::copy_n(logits, experts, rank);
        for (int k = 0; k < most; k++) {
            int best = int(std::max_element(rank, rank + experts) - rank);
            float top = rank[best], total = 0.f;
            for (int i = 0; i < experts; i++) {
                bool far = (top - logits[i]) / std::max(std::abs(logits[i]), top) > 2.f * op.jitter;
                if (!far && rank[i] != LOWEST) total += exp1(rank[i] - top);
            }
            rank[best] = LOWEST;
            int at = k;  // sorted by number, the weight beside it
            for (; at > 0 && chosen.id[at - 1] > best; at--) {
                chosen.id[at] = chosen.id[at - 1];
                weight[at] = weight[at - 1];
            }
            chosen.id[at] = best;
            weight[at] = 1.f / total;
        }
    }
};

void route(const Route& op, const Step& s, int64_t r) {
    Router router(op, s, r);
    float* weight = at(op.weights, s) + r * op.top_k;
    if (op.scores == Scores::SPARSEMIXER)
        router.mix(weight);
    else if (op.scores == Scores::SOFTMAX_CHOSEN)
        router.weigh_chosen(weight);
    else {
        router.score_all();
        if (op.by_token.present())
            router.choose_by_token(s, r);
        else
            router.choose_best();
        router.weigh_scores(weight);
    }
    std::copy_n(router.chosen.id, op.top_k, at(op.experts, s) + r * op.top_k);
}

// The expert of this rank that computes a pair; `num_experts`: another rank's expert does. `owner`
// gets the group of ranks that computes it.
int held_expert(const MoeAlign& op, const int32_t* slots, int32_t expert, int row, int32_t& owner) {
    int slot = slots[expert * op.copies + row % op.copies];
    owner = slot / op.num_experts;
    slot -= op.first_slot;
    return slot >= 0 && slot < op.num_experts ? slot : op.num_experts;
}

// A pair is a row and one of its experts, with the number row * top_k + k. Sorts pairs by expert,
// then by row.
void moe_align(const MoeAlign& op, const Step& s, int, void*) {
    const int32_t *id = at(op.experts, s), *slots = at(op.slots, s);
    int64_t* load = at(op.load, s);
    int32_t *pair = at(op.sorted_pairs, s), *place = at(op.pair_places, s);
    int32_t *groups = at(op.groups, s), *owner = at(op.owners, s);
    int pairs = rows(op, s) * op.top_k, next[MAX_EXPERTS + 1] = {}, start = 0;
    for (int p = 0; p < pairs; p++) {
        load[id[p]]++;
        place[p] = slots ? held_expert(op, slots, id[p], p / op.top_k, owner[p]) : id[p];
        next[place[p]]++;
    }
    int32_t* group = groups + 1;
    for (int e = 0; e < op.num_experts; e++) {
        int count = next[e];
        next[e] = start;
        for (int i = 0; i < count; i += LINEAR_ROWS, group += 3) {
            group[0] = e;
            group[1] = start + i;
            group[2] = std::min(LINEAR_ROWS, count - i);
        }
        start += count;
    }
    groups[0] = int(group - groups - 1) / 3;
    next[op.num_experts] = start;  // those of other ranks
    for (int p = 0; p < pairs; p++) {
        int expert = place[p], found = next[expert]++;
        pair[found] = p;
        place[p] = expert < op.num_experts ? found : -1;
    }
}
int one_tile(const Op&, const Step&) { return 1; }

template <class T> void gather_rows(const GatherRows& op, const Step& s, int64_t r) {
    if (const int32_t* groups = at(op.groups, s); groups && r >= grouped_rows(groups)) return;
    int64_t width = stride(op.cols);
    int32_t pair = at(op.sorted_pairs, s)[r];
    const T* x = at<T>(op.x, s) + pair / op.top_k * width;
    T* out = at<T>(op.out, s) + r * width;
    const float* weights = at(op.weights, s);
    if (!weights)
        memcpy(out, x, width * sizeof(T));
    else
        for (int i = 0; i < width; i += LANES) put(out + i, get(x + i) * weights[pair]);
    quantise_row(op.quantised, op.cols, s, r, out);
}

// Rows are quantised once before they are gathered, however many experts they go to.
void gather_quantised(const GatherQuantised& op, const Step& s, int64_t r) {
    if (const int32_t* of = at(op.groups, s); of && r >= grouped_rows(of)) return;
    int64_t from = at(op.sorted_pairs, s)[r] / op.top_k, bytes = op.bytes, groups = op.num_groups;
    memcpy(at(op.out_qvalues, s) + r * bytes, at(op.qvalues, s) + from * bytes, bytes);
    at(op.out_scales, s)[r] = at(op.scales, s)[from];
    if (const int32_t* sums = at(op.sums, s))
        memcpy(at(op.out_sums, s) + r * groups, sums + from * groups, groups * 4);
}

// Sums the outputs of a row's experts in the order of expert numbers.
template <class T> void expert_sum(const ExpertSum& op, const Step& s, int64_t r) {
    int64_t width = stride(op.cols);
    int chosen = op.top_k;
    const int32_t* place = at(op.pair_places, s) + r * chosen;
    const float* weights = at(op.weights, s);
    T* out = at<T>(op.out, s) + r * width;
    for (int i = 0; i < width; i += LANES) {
        vf total{};
        for (int k = 0; k < chosen; k++) {
            float weight = weights ? weights[r * chosen + k] : 1.f;
            total = fma(get(at<T>(op.x, s) + place[k] * width + i), splat(weight), total);
        }
        put(out + i, total);
    }
}

}  // namespace

const Kernel route_kernel[2] = {per_row<route>, per_row<route>};
const Kernel moe_align_kernel[2] = {tiled<one_tile, moe_align>, tiled<one_tile, moe_align>};
const Kernel gather_rows_kernel[2] = {per_row<gather_rows<bf16>>, per_row<gather_rows<float>>};
const Kernel gather_quantised_kernel[2] = {per_row<gather_quantised>, per_row<gather_quantised>};
const Kernel expert_sum_kernel[2] = {per_row<expert_sum<bf16>>, per_row<expert_sum<float>>};
