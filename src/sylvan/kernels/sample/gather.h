// What the head learns of rows to sample as it multiplies them, tile by tile, while the tiles are
// in the caches of their thread: the largest logit of greedy rows, the k largest of others. Their
// logits are never written.
//
// A row that is written costs 4 V bytes of memory written, which reads them first, and read
// again: 1.8 MB at V = 151,936, or at D = 896 in bf16 0.7% of the head's 272 MB for one row, and
// 21% for 32. Draws that no top-k bounds may end anywhere: their rows are written.
// benchmarks/kernels/bench_sample.py measures both ways.
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
RowNeeds wish_of(const Sample& sample, int row, int threads);

// the largest logit of a row so far and where it is, the first of equals; NaN never is
struct alignas(8) Best {
    float value;
    int32_t id;  // or NO_LOGIT: no logit above minus infinity yet
};
constexpr int32_t NO_LOGIT = INT32_MAX;

class LogitsCollector {
public:
    bool begin(const Sample& sample, int threads);  // whether it wants anything of any row
    bool writes(int row) const { return wishes[row].kind == RowNeeds::WHOLE; }

    // Takes columns first .. first + cols of a row, at most one piece; overwrites those beyond the
    // vocabulary. A whole piece if any row wants statistics. Any thread may bring any piece, each
    // by rising id; the result is independent of the thread assignment.
    bool surveys() const { return num_surveys > 0; }
    void take(int row, float* x, int first, int cols, int thread);

    // Called after the last column. Moves the kept logits to the scratch memory, by rising id.
    const RowNeeds& wish(int row) const { return wishes[row]; }
    const Best& best(int row) const { return bests[row]; }
    BlockStats survey(int row, SamplerScratch& scratch) const;
    void kept(int row, SamplerScratch& scratch) const;

private:
    struct alignas(64) List {  // a line of its own: threads write theirs at the same time
        float bar;             // lower logits are not among the largest
        int32_t count;         // entries, by rising id
    };

    int vocab = 0, threads = 0, num_surveys = 0;
    int room = 0;                  // for surveys
    std::vector<RowNeeds> wishes;  // by row
    std::vector<float> scales;     // of its temperature, by row
    std::vector<int> places;       // of its statistics, by row
    std::vector<int> listed;       // of its lists, by row
    std::vector<int64_t> entries;  // before its own
    std::vector<Best> bests;
    // [pieces][room]: threads bring neighbouring pieces at the same time
    std::vector<float> tops, sums;
    std::vector<List> lists;  // [rows with lists][threads]
    // [entries], [threads][list_room] of each row with lists, in the order of the logits
    std::vector<uint32_t> keys;
    std::vector<int32_t> ids;  // of the same

    void look(int row, const float* x, int first, int cols);
    void keep(int row, const float* x, int first, int cols, int thread);
    int64_t list_of(int row, int thread) const { return int64_t(listed[row]) * threads + thread; }
    int64_t entry_of(int row, int thread) const {
        return entries[row] + int64_t(thread) * list_room(wishes[row].count);
    }
    // before the largest are selected
    static int list_room(int count) { return round_up(2 * count, LANES) + PIECE + LANES; }
    friend RowNeeds wish_of(const Sample& sample, int row, int threads);
};
