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

struct RowNeeds {
    // WHOLE: all logits are needed, because they are edited before sampling or any of them may be
    // drawn or reported. KEPT: the `count` largest suffice, plus block statistics if the total is
    // needed. LARGEST: the first of the largest suffices.
    enum Kind : uint8_t { WHOLE, KEPT, LARGEST } kind;
    bool total;
    int32_t count;
};
RowNeeds needs_of(const Sample& sample, int row, int threads);

// the largest logit of a row so far and its id; the first of equals; never NaN
struct alignas(8) Best {
    float value;
    int32_t id;  // or NO_LOGIT: no logit above minus infinity yet
};
constexpr int32_t NO_LOGIT = INT32_MAX;

class LogitsCollector {
public:
    bool begin(const Sample& sample, int threads);  // whether it wants anything of any row
    bool writes(int row) const { return needs[row].kind == RowNeeds::WHOLE; }

    // Takes columns first .. first + cols of a row, at most one piece; overwrites those beyond the
    // vocabulary. A whole piece if any row wants statistics. Any thread may bring any piece, each
    // by rising id; the result is independent of the thread assignment.
    bool wants_stats() const { return num_stats > 0; }
    void take(int row, float* x, int first, int cols, int thread);

    // Called after the last column. Moves the kept logits to the scratch memory, by rising id.
    const RowNeeds& needs_of_row(int row) const { return needs[row]; }
    const Best& best(int row) const { return bests[row]; }
    BlockStats stats(int row, SamplerScratch& scratch) const;
    void kept(int row, SamplerScratch& scratch) const;

private:
    struct alignas(64) List {  // a line of its own: threads write theirs at the same time
        float bar;             // lower logits are not among the largest
        int32_t count;         // entries, by rising id
    };

    int vocab = 0, threads = 0, num_stats = 0;
    int stats_stride = 0;          // rows with statistics, padded to a cache line
    std::vector<RowNeeds> needs;   // by row
    std::vector<float> scales;     // of its temperature, by row
    std::vector<int> places;       // of its statistics, by row
    std::vector<int> listed;       // of its lists, by row
    std::vector<int64_t> entries;  // before its own
    std::vector<Best> bests;
    // [pieces][stats_stride]: threads bring neighbouring pieces at the same time
    std::vector<float> tops, sums;
    std::vector<List> lists;  // [rows with lists][threads]
    // [entries], [threads][list_size] of each row with lists, in the order of the logits
    std::vector<uint32_t> keys;
    std::vector<int32_t> ids;  // of the same

    void look(int row, const float* x, int first, int cols);
    void keep(int row, const float* x, int first, int cols, int thread);
    int64_t list_of(int row, int thread) const { return int64_t(listed[row]) * threads + thread; }
    int64_t entry_of(int row, int thread) const {
        return entries[row] + int64_t(thread) * list_size(needs[row].count);
    }
    // before the largest are selected
    static int list_size(int count) { return round_up(2 * count, LANES) + PIECE + LANES; }
    friend RowNeeds needs_of(const Sample& sample, int row, int threads);
};
