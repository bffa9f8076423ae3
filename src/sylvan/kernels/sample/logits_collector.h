// Collects what sampling needs while the LM head computes logits, tile by tile in the cache: the
// largest logit of greedy rows, the k largest of others. Logits of such rows are never written.
//
// Writing a row of logits costs 4 V bytes written (and first read), and 4 V read again: 1.8 MB at V
// = 151,936; at D = 896 in bf16 that is 0.7% of the head's 272 MB for one row, and 21% for 32. Rows
// that are sampled without top-k may need any logit, so they are written.
#pragma once
#include "draw.h"
#include "sample.h"
#include <atomic>

// The logits of a row that sampling needs.
struct RowNeeds {
    // WHOLE: all logits, because they are edited before sampling or any of them may be drawn or
    // reported. KEPT: the `count` largest, plus block statistics if `total`. LARGEST: the largest.
    enum Kind : uint8_t { WHOLE, KEPT, LARGEST } kind;
    bool total;  // whether the softmax denominator is needed
    int32_t count;
};
RowNeeds needs_of(const Sample& sample, int row, int threads);

// The largest logit of a row so far and its id; ties: the lowest id. Never NaN.
struct alignas(8) Best {
    float value;
    int32_t id;  // NO_LOGIT: none above minus infinity yet
};
constexpr int32_t NO_LOGIT = INT32_MAX;

class LogitsCollector {
public:
    // Starts a step; returns whether the logits of any row need not be written.
    bool begin(const Sample& sample, int threads);
    bool writes(int row) const { return needs[row].kind == RowNeeds::WHOLE; }

    // Takes columns first .. first + cols of a row, at most one block, and overwrites those beyond
    // the vocabulary. If any row needs statistics, callers pass whole blocks. Each thread passes
    // its blocks by rising id; the result does not depend on which thread passes which block.
    bool wants_stats() const { return num_stats > 0; }
    void take(int row, float* x, int first, int cols, int thread);

    // Results, after the last column. `kept` moves the kept logits to `scratch`, by rising id.
    const RowNeeds& needs_of_row(int row) const { return needs[row]; }
    const Best& best(int row) const { return bests[row]; }
    BlockStats stats(int row, SamplerScratch& scratch) const;
    void kept(int row, SamplerScratch& scratch) const;

private:
    struct alignas(64) List {  // one cache line: threads write their lists concurrently
        float threshold;       // lower logits are not among the `count` largest
        int32_t count;         // entries so far, by rising id
    };

    int vocab = 0, threads = 0, num_stats = 0;
    int stats_stride = 0;          // rows with statistics, padded to a cache line
    std::vector<RowNeeds> needs;   // by row
    std::vector<float> scales;     // by row: see `scale_of`
    std::vector<int> stats_index;  // by row: column in `tops` and `sums`; -1: no statistics
    std::vector<int> list_index;   // by row: index among the rows with lists; -1: no list
    std::vector<int64_t> entries;  // by row: first entry in `keys` and `ids`
    std::vector<Best> bests;
    // [blocks][stats_stride]: threads write neighbouring blocks at the same time
    std::vector<float> tops, sums;
    std::vector<List> lists;  // [rows with lists][threads]
    // entries of the lists: [threads][list_size] for each row with lists
    std::vector<uint32_t> keys;  // integers that sort as the logits
    std::vector<int32_t> ids;

    void measure(int row, const float* x, int first, int cols);
    void keep(int row, const float* x, int first, int cols, int thread);
    int64_t list_of(int row, int thread) const {
        return int64_t(list_index[row]) * threads + thread;
    }
    int64_t entry_of(int row, int thread) const {
        return entries[row] + int64_t(thread) * list_size(needs[row].count);
    }
    // capacity of a list: it is reduced to the `count` largest when it has twice as many
    static int list_size(int count) { return round_up(2 * count, LANES) + STATS_BLOCK + LANES; }
    friend RowNeeds needs_of(const Sample& sample, int row, int threads);
};
