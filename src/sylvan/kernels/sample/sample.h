// The C ABI of sampling, for step programs and for the runtime's sampler. `native/sampling.py`
// mirrors it.
#pragma once
#include "../native/program.h"
#include <atomic>
#include <cstdint>

// Sampling parameters: arrays over request slots, written when requests join and leave.
struct SampleSlots {
    const uint8_t* greedy;
    const float* temperature;
    const int64_t* top_k;  // at least 1; the vocabulary or more means all
    const float *top_p, *min_p, *frequency, *presence, *repetition;
    const int64_t *seed, *sample;
    const int64_t* min_position;  // no stop token may be sampled before it
    const uint8_t* has_penalty;
    const int64_t* counts_row;  // row of `counts`; -1: the request has no penalty
    // addresses of lists, whose lengths follow
    const int64_t *stops, *bias_ids, *bias, *chosen_ids;
    const int32_t *num_stops, *num_bias, *num_chosen;
    const uint8_t* has_logprobs;
    const int32_t* top;   // number of alternatives whose log probabilities are wanted
    const float* counts;  // [][vocab] how often each id was generated
};

struct Logprobs {  // log probabilities, for the rows that want them
    float* own;    // [rows] of the sampled ids
    // [rows][top_stride] the most likely ids: by falling log probability, ties by rising id
    int32_t* top_ids;
    float* top;
    float* chosen;  // [rows][chosen_stride]
    int32_t top_stride, chosen_stride;
};

struct Sample {
    int32_t rows, vocab;
    int64_t stride;  // floats from row to row
    float* logits;   // edited in place; rows already reduced in the head are undefined
    const SampleSlots* params;
    const int32_t* slots;      // [rows]
    const int32_t* positions;  // [rows] of the tokens that are sampled
    const int32_t* mask_of;    // [rows] row of `masks`, -1: none; or null
    const int32_t* masks;      // bit i of a row allows id i
    int64_t mask_stride;
    int32_t* ids;       // [rows] results
    uint8_t* failed;    // [rows] whether all logits were masked out or NaN
    Logprobs logprobs;  // `own` null: no row wants log probabilities
};

struct ForcedTokens {  // given tokens whose log probabilities are wanted
    int32_t rows, vocab;
    int64_t stride;
    const float* logits;
    const int32_t* ids;
    const int32_t* chosen_ids;
    int32_t top, num_chosen;
    Logprobs logprobs;
};

class LogitsCollector;

// Samples rows until none is left; any number of threads may call it concurrently. `collector` has
// the logits that the LM head collected instead of writing them; null: all logits were written.
void sample_rows(const Sample& sample, std::atomic<int>& next,
                 const LogitsCollector* collector = nullptr);
int count_failed(const Sample& sample);
