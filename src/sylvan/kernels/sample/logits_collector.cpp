#include "logits_collector.h"
#include <algorithm>

namespace {

// ids per kept logit: with fewer, writing the whole row is less work
constexpr int MIN_IDS_PER_KEPT = 300;
// size of all rows below which they stay in the caches, so that writing them is cheaper
constexpr int CACHED_BYTES = 8 << 20;

void keep_larger(Best& place, const float* x, int first, int cols) {
    std::atomic_ref<Best> best(place);
    Best old = best.load(std::memory_order_relaxed);
    vi better{};
    for (int i = 0; i < cols; i += LANES) better |= load<vf>(x + i) >= splat(old.value);
    if (!any(better)) return;
    Best mine{-INFINITY, NO_LOGIT};
    for (int i = 0; i < cols; i++)
        if (x[i] > mine.value) mine = {x[i], first + i};
    while (mine.value > old.value || (mine.value == old.value && mine.id < old.id))
        if (best.compare_exchange_weak(old, mine, std::memory_order_relaxed)) return;
}

// Keys of logits: unsigned integers that sort in the same order.
vu keys_of(vf x) {
    vi v = (vi)(x + 0.f);  // maps both zeros to one
    return (vu)(v ^ (v >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

float logit_of(uint32_t key) {
    int32_t v = int32_t(key ^ 0x80000000u);
    v ^= v >> 31 & 0x7fffffff;
    float x;
    memcpy(&x, &v, 4);
    return x;
}

// Number of keys that are at least `least`; keys are padded with zeros to whole vectors.
int num_from(const uint32_t* keys, int n, uint32_t least) {
    vi found{};
    for (int i = 0; i < n; i += LANES) found -= (vi)(load<vu>(keys + i) >= least);
    return sum(found);
}

// Keeps the `count` largest of n keys in place, and up to a quarter more; returns a lower bound of
// the kept keys. A radix search bit by bit, without branches that depend on the keys: introselect
// mispredicts every second comparison.
uint32_t select_largest(uint32_t* keys, int32_t* ids, int& n, int count) {
    for (int i = n; i < round_up(n, LANES); i++) keys[i] = 0;
    uint32_t least = 0;
    int from = n, enough = count + count / 4;  // from: number of keys that are at least `least`
    for (uint32_t bit = 1u << 31; bit && from > enough; bit >>= 1)
        if (int found = num_from(keys, n, least | bit); found >= count) {
            least |= bit;
            from = found;
        }
    if (from > enough)  // equal logits: keep the first `count`
        for (int i = n - 1; i >= 0 && from > count; i--)
            if (keys[i] == least) {
                keys[i] = 0;
                from--;
            }
    int to = 0;
    for (int i = 0; i < n; i++) {
        keys[to] = keys[i];
        ids[to] = ids[i];
        to += keys[i] >= least;
    }
    n = to;
    return least;
}

// Appends the lanes in `which`; may write up to 16 entries. Returns their number.
int append(uint32_t* keys, int32_t* ids, vf x, int first, uint32_t which) {
#if defined(__AVX512F__)
    store(keys, (vu)_mm512_maskz_compress_epi32(__mmask16(which), (__m512i)keys_of(x)));
    store(ids, (vi)_mm512_maskz_compress_epi32(__mmask16(which), (__m512i)(lanes() + first)));
#else
    uint32_t all[LANES];
    store(all, keys_of(x));
    each_bit(which, [&](int l) {
        *keys++ = all[l];
        *ids++ = first + l;
    });
#endif
    return __builtin_popcount(which);
}

}  // namespace

RowNeeds needs_of(const Sample& s, int row, int threads) {
    const SampleSlots& t = *s.params;
    int slot = s.slots[row];
    bool stops = t.num_stops[slot] && s.positions[row] < t.min_position[slot];
    bool wants_logprobs = s.logprobs.own && t.has_logprobs[slot];
    bool changed =
        t.has_penalty[slot] || stops || t.num_bias[slot] || (s.mask_of && s.mask_of[row] >= 0);
    if (changed || (wants_logprobs && t.num_chosen[slot])) return {RowNeeds::WHOLE, false, 0};
    int64_t count = t.greedy[slot] ? 1 : std::min<int64_t>(t.top_k[slot], s.vocab);
    if (count == 1 && !wants_logprobs) return {RowNeeds::LARGEST, false, 1};
    if (wants_logprobs) count = std::max<int64_t>(count, std::min(t.top[slot], s.vocab));
    Filter filter{t.top_k[slot], t.top_p[slot], t.min_p[slot]};
    bool total = wants_logprobs || (!t.greedy[slot] && filter.needs_total(s.vocab));
    // an entry takes two words, a logit one
    bool large = int64_t(LogitsCollector::list_size(int(count))) * threads * 2 > s.vocab;
    if (count * MIN_IDS_PER_KEPT > s.vocab || large ||
        (total && int64_t(s.rows) * s.vocab * 4 < CACHED_BYTES))
        return {RowNeeds::WHOLE, false, 0};
    return {RowNeeds::KEPT, total, int32_t(count)};
}

bool LogitsCollector::begin(const Sample& sample, int num_threads) {
    vocab = sample.vocab;
    threads = num_threads;
    num_stats = 0;
    needs.resize(sample.rows);
    scales.resize(sample.rows);
    stats_index.resize(sample.rows);
    list_index.resize(sample.rows);
    entries.resize(sample.rows);
    bests.assign(sample.rows, {-INFINITY, NO_LOGIT});
    int lists_wanted = 0;
    int64_t all = 0;
    bool wanted = false;
    for (int row = 0; row < sample.rows; row++) {
        RowNeeds& w = needs[row] = needs_of(sample, row, threads);
        scales[row] = scale_of(sample.params->temperature[sample.slots[row]]);
        wanted |= w.kind != RowNeeds::WHOLE;
        stats_index[row] = w.total ? num_stats++ : -1;
        list_index[row] = w.kind == RowNeeds::KEPT ? lists_wanted++ : -1;
        entries[row] = all;
        if (w.kind == RowNeeds::KEPT) all += int64_t(list_size(w.count)) * threads;
    }
    lists.assign(int64_t(lists_wanted) * threads, {-INFINITY, 0});
    if (int64_t(keys.size()) < all) {
        keys.clear();
        keys.resize(all);
        ids.clear();
        ids.resize(all);
    }
    stats_stride = round_up(num_stats, 64 / sizeof(float));
    if (size_t size = size_t(count_blocks(vocab)) * stats_stride; tops.size() < size) {
        tops.resize(size);
        sums.resize(size);
    }
    return wanted;
}

void LogitsCollector::take(int row, float* x, int first, int cols, int thread) {
    if (first >= vocab) return;
    for (int i = std::max(0, vocab - first); i < cols; i++) x[i] = -INFINITY;
    if (needs[row].kind == RowNeeds::LARGEST) keep_larger(bests[row], x, first, cols);
    if (stats_index[row] >= 0) measure(row, x, first, cols);
    if (list_index[row] >= 0) keep(row, x, first, cols, thread);
}

void LogitsCollector::measure(int row, const float* x, int first, int cols) {
    int64_t to = int64_t(first / STATS_BLOCK) * stats_stride + stats_index[row];
    measure_block(x, cols, scales[row], tops[to], sums[to]);
}

void LogitsCollector::keep(int row, const float* x, int first, int cols, int thread) {
    List& list = lists[list_of(row, thread)];
    uint32_t* my_keys = keys.data() + entry_of(row, thread);
    int32_t* my_ids = ids.data() + entry_of(row, thread);
    vf threshold = splat(list.threshold);
    int count = list.count;
    for (int i = 0; i < cols; i += LANES) {
        vf v = load<vf>(x + i);
        if (uint32_t high = bits((v >= threshold) & (v > -INFINITY)))
            count +=
                append(my_keys + count, my_ids + count, min(v, splat(FLT_MAX)), first + i, high);
    }
    int wanted = needs[row].count;
    if (count >= 2 * wanted)
        list.threshold = logit_of(select_largest(my_keys, my_ids, count, wanted));
    list.count = count;
}

BlockStats LogitsCollector::stats(int row, SamplerScratch& scratch) const {
    if (stats_index[row] < 0) return {};
    BlockStats mine = scratch.stats.empty(vocab);
    for (int i = 0; i < mine.num_blocks; i++) {
        int64_t from = int64_t(i) * stats_stride + stats_index[row];
        scratch.stats.tops[i] = tops[from];
        scratch.stats.sums[i] = sums[from];
    }
    return mine;
}

void LogitsCollector::kept(int row, SamplerScratch& scratch) const {
    auto& all = scratch.kept;
    all.clear();
    for (int t = 0; t < threads; t++) {
        int64_t at = entry_of(row, t);
        for (int64_t end = at + lists[list_of(row, t)].count; at < end; at++)
            all.push_back({logit_of(keys[at]), 0, ids[at]});
    }
    size_t wanted = needs[row].count;
    if (all.size() > wanted) {
        std::nth_element(all.begin(), all.begin() + wanted - 1, all.end());
        all.resize(wanted);
    }
    std::sort(all.begin(), all.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}
