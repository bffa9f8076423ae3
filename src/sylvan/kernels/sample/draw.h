// Draws from one row, as sylvan.runtime.sampling defines it: from what is known of the row, be it all of its logits or only
// the largest of them.
#pragma once
#include "survey.h"

struct Candidate {
    float x, p;
    int32_t id;
    bool operator<(const Candidate& b) const { return x != b.x ? x > b.x : id < b.id; }  // the likelier first
};

struct Desk {  // memory that a thread keeps between rows
    SurveyRoom survey;
    std::vector<float> masses;
    std::vector<Candidate> kept, found, edge;
    std::vector<int> counts;
    std::vector<double> sums;
};

struct Known {
    const float* x;  // all logits; null: only those that lie on the desk as `kept`, by rising id
    int n;
    Survey survey;   // without pieces: the total is not wanted
    float temperature;
    bool as_it_is = false;  // log probabilities of what is no number or infinite are none; else it is cleaned
};

struct Filter {  // which ids are kept
    int64_t k;
    float top_p, min_p;
    bool needs_total(int n) const { return top_p < 1.f && !(min_p > 0.f && k < n); }  // else of the first k's mass
    bool keeps_all(int n) const { return k >= n && top_p >= 1.f && min_p <= 0.f; }
};

struct Cut {  // what of the candidates, ordered, is kept: all of the bins before `bin`, and of that one those up to `last`
    int bin;
    bool some = false;
    Candidate last{};
    double mass;
};

class Distribution {  // p = exp((x - top) / temperature); sums run over pieces of ids, then over ids
  public:
    Distribution(const Known& known, Desk& desk);

    bool possible() const { return top > -INFINITY; }
    int likeliest() const;                               // the first of equals
    int draw(double u, const Filter& filter) const;      // among the kept, the first at which their running sum exceeds u times it
    float logprob(int id) const { return logprob_of(logit(id)); }
    void most_likely(int count, int32_t* ids, float* logprobs) const;  // equals by rising id

  private:
    Known known;
    Desk& desk;
    float top = -INFINITY, scale;  // see survey.h
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

double uniform(uint64_t seed, uint64_t sample, uint64_t position);  // of [0, 1): Philox4x32-10, see runtime/sampling/philox.py
