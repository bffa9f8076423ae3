// Samples from one row as defined by sylvan.runtime.sampling, given all of its logits or only the
// largest.
#pragma once
#include "block_stats.h"

struct Candidate {
    float x, p;
    int32_t id;
    // the likelier first
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
    BlockStats stats;  // without pieces: the total is not wanted
    float temperature;
    // if the row has NaN or infinity, report no log probabilities; else clean it
    bool as_it_is = false;
};

struct Filter {  // which ids are kept
    int64_t k;
    float top_p, min_p;
    // of the mass of the first k
    bool needs_total(int n) const { return top_p < 1.f && !(min_p > 0.f && k < n); }
    bool keeps_all(int n) const { return k >= n && top_p >= 1.f && min_p <= 0.f; }
};

// which of the ordered candidates are kept: all bins before `bin`, and of that bin those up to
// `last`
struct Cut {
    int bin;
    bool some = false;
    Candidate last{};
    double mass;
};

// p = exp((x - top) / temperature); sums run over pieces of ids, then over ids
class Distribution {
public:
    Distribution(const RowLogits& known, SamplerScratch& scratch);

    bool possible() const { return top > -INFINITY; }
    int likeliest() const;  // the first of equals
    // among the kept, the first at which their running sum exceeds u times it
    int draw(double u, const Filter& filter) const;
    float logprob(int id) const { return logprob_of(logit(id)); }
    void most_likely(int count, int32_t* ids, float* logprobs) const;  // equals by rising id

private:
    RowLogits known;
    SamplerScratch& scratch;
    float top = -INFINITY, scale;  // see block_stats.h
    double total = 0;

    float p(float x) const { return weight(splat(x), top, scale)[0]; }
    int bin_of(const Candidate& c) const;
    Cut cut(int64_t k, double wanted) const;
    float logit(int id) const;
    float logprob_of(float x) const {
        return x < INFINITY ? float(double((x - top) / known.temperature) - std::log(total)) : NAN;
    }
    int draw_any(double u) const;
    int draw_within(int piece, double before, double target) const;
    int draw_kept(double u, const Filter& filter) const;
    double gather(float least) const;
};

// in [0, 1): Philox4x32-10, see runtime/sampling/philox.py
double uniform(uint64_t seed, uint64_t sample, uint64_t position);
