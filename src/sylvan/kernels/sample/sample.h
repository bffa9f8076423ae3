// Samples a batch, for step programs and for the sampler of the runtime.
// `binding.py` mirrors it.
#pragma once
#include "../native/program.h"
#include <atomic>
#include <cstdint>

// parameters of requests: arrays over request slots, written when requests join and leave
struct SampleSlots {
    const uint8_t* greedy;
    const float* temperature;
    const int64_t* top_k;  // at least 1; the vocabulary or more means all
    const float *top_p, *min_p, *frequency, *presence, *repetition;
    const int64_t *seed, *sample;
    const int64_t* min_position;  // no stop token may be sampled before it
    const uint8_t* has_penalty;
    const int64_t* counts_row;  // row of `counts`, of slots that have a penalty
    const int64_t *stops, *bias_ids, *bias, *chosen_ids;  // addresses of lists, of these lengths:
    const int32_t *num_stops, *num_bias, *num_chosen;
    const uint8_t* has_logprobs;
    const int32_t* top;   // alternatives wanted
    const float* counts;  // [][vocab] how often each id was generated
};

struct Logprobs {  // results for the rows that want some
    float* own;    // [rows]
    // [rows][top_stride], by falling log probability, equals by rising id
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
    int32_t* ids;       // results
    uint8_t* failed;    // no token was possible
    Logprobs logprobs;  // `own` null: no row wants log probabilities
};

struct ForcedTokens {  // tokens that are there already
    int32_t rows, vocab;
    int64_t stride;
    const float* logits;
    const int32_t* ids;
    const int32_t* chosen_ids;
    int32_t top, num_chosen;
    Logprobs logprobs;
};

class LogitsCollector;  // logits collected in the head, for rows that may not have been written

// Processes rows until none is left; any number of threads may call it concurrently. Without
// `gather`, all logits were written.
void sample_rows(const Sample& sample, std::atomic<int>& next,
                 const LogitsCollector* gather = nullptr);
int count_failed(const Sample& sample);
