// Samples from one row as defined by sylvan.runtime.sampling, given all of its logits or only the
// largest.
#pragma once
#include "block_stats.h"

struct Candidate {
    float x, p;
    int32_t id;
    // sorts by falling logit, then by rising id
    bool operator<(const Candidate& b) const { return x != b.x ? x > b.x : id < b.id; }
};

struct SamplerScratch {  // scratch memory of a thread, kept between rows
    BlockStatsScratch stats;
    std::vector<float> masses;
    std::vector<Candidate> kept, found, edge;
    std::vector<int> counts;
    std::vector<double> sums;
};

struct RowLogits {
    const float* x;  // all logits; null: only the `kept` ones in the scratch memory, by rising id
    int n;
    BlockStats stats;  // empty if the softmax denominator is not needed
    float temperature;
    // true: NaN or infinity in the row voids its log probabilities; false: they are cleaned
    bool keeps_non_finite = false;
};

struct Filter {  // top-k, top-p and min-p of a row
    int64_t k;
    float top_p, min_p;
    // whether top-p is a share of the whole row; otherwise it is a share of the k best
    bool needs_total(int n) const { return top_p < 1.f && !(min_p > 0.f && k < n); }
    bool keeps_all(int n) const { return k >= n && top_p >= 1.f && min_p <= 0.f; }
};

// The kept prefix of the sorted candidates: all bins before `bin`, and in that bin those up to
// `last`.
struct Cut {
    int bin;
    bool some = false;
    Candidate last{};
    double mass;
};

// The distribution of a row: p = exp((x - top) / temperature). Sums are taken within a block of
// ids, then over the blocks.
class Distribution {
public:
    Distribution(const RowLogits& row, SamplerScratch& scratch);

    bool possible() const { return top > -INFINITY; }
    int likeliest() const;  // ties: the lowest id
    // the first kept id at which the cumulative mass exceeds u times the kept mass
    int draw(double u, const Filter& filter) const;
    float logprob(int id) const { return logprob_of(logit(id)); }
    void most_likely(int count, int32_t* ids, float* logprobs) const;  // ties by rising id

private:
    RowLogits row;
    SamplerScratch& scratch;
    float top = -INFINITY, scale;  // see block_stats.h
    double total = 0;

    float p(float x) const { return weight(splat(x), top, scale)[0]; }
    int bin_of(const Candidate& c) const;
    Cut cut(int64_t k, double wanted) const;
    float logit(int id) const;
    float logprob_of(float x) const {
        return x < INFINITY ? float(double((x - top) / row.temperature) - std::log(total)) : NAN;
    }
    int draw_any(double u) const;
    int draw_within(int group, double before, double target) const;
    int draw_kept(double u, const Filter& filter) const;
    double gather(float least) const;
};

// A random number in [0, 1) by Philox4x32-10; see runtime/sampling/philox.py.
double uniform(uint64_t seed, uint64_t sample, uint64_t position);
