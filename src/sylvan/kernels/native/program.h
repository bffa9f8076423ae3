// The C ABI between recorder and library: plain structs and pointers, no C++ types, no torch. `binding.py` mirrors it.
#pragma once
#include <cstdint>
#include <cstddef>

#define SYLVAN_API extern "C" __attribute__((visibility("default")))

enum Kind : int32_t {
    EMBED, RMS_NORM, LAYER_NORM, QUANTISE, LINEAR, LINEAR_INT8, LINEAR_INT4, GLU, ACTIVATION, ROPE_STORE, ATTENTION,
    ATTENTION_MERGE, TAKE_ROWS, ADD, SCALE, SOFTCAP, CAST, SCALE_ROWS, ROUTE, ALIGN, GATHER, EXPERT_SUM,
    LATENT_ROWS, HEAD_GROUPS, TO_STACK, FROM_STACK, GATHER_LEVELS, SHORT_CONV, SPACE_SCAN, DELTA_SCAN, N_KINDS
};
enum Count : int32_t { TOKENS, OUTPUTS };  // which run-time row count an op works on
enum Type : int32_t { BF16, F32_ROWS };    // what rows (and KV) are made of
enum Function : int32_t { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, TANH };

struct Op {  // one native kernel call; constant after recording
    int32_t kind, count, type;
    int32_t times;    // rows of the op for each of its run-time row count; 0: one
    int32_t buf[12];  // ids into the buffer table, -1 = absent
    int32_t n[16];    // sizes
    float f[4];       // scalars
};

struct Run {  // everything that changes from step to step
    int32_t tokens, outputs, seqs, table_stride;
    int32_t groups, slot_step;  // groups of layers with a page table each (0: one); from one's slots to the next one's
    int64_t table_step;         // from one group's page table to the next one's
    const int32_t* ids;         // [tokens]
    const int32_t* positions;   // [tokens]
    const int32_t* slots;       // [groups][tokens] page * page_size + offset: where this token's KV goes
    const int32_t* row_start;   // [seqs + 1] rows of request s: row_start[s] .. row_start[s + 1]
    const int32_t* kv_len;      // [seqs] tokens in the cache after this step
    const int32_t* table_row;   // [seqs] row of the page table
    const int32_t* page_table;  // [groups][rows][table_stride]
    const int32_t* out_rows;    // [outputs] rows whose logits are wanted
    const int32_t* types;       // [tokens] token types; only models that have a table of them read it
    int64_t* profile;           // [ops] ns spent, added to; or null
    const struct Inputs* inputs;  // if set, all of the above but `profile` is made from it first
    struct Sample* sample;        // if set, the logits are sampled afterwards
};

struct Inputs {  // a step as the scheduler sees it: the arrays of a run follow from it
    int32_t seqs, tokens, outputs, in_flight, page_size, vocab;
    // slots, first and past-the-last position of each request [3][seqs] | requests that are sampled [outputs], again for each row more |
    // rows whose id the step before sampled, and their request slots [2][in_flight] | ids [tokens]
    const int32_t* numbers;
    int32_t* last_token;  // [slots] read here, and written once sampled
};

struct PagedBytes {  // memory in pages: bytes of page p in region r begin at memory + r * region_step + p * page_step
    char* memory;
    int64_t regions, region_step, page_step, width;  // width: bytes of a page in one region
};

struct Item {  // attention work: query vectors (row, head of the group) first .. first + count of a request
    int32_t seq, first, count;
};

struct Work {  // the items of a step for one size of query group
    const Item* items;
    int count, chunks;  // chunks: of the longest request
    bool split;         // chunks are spread over threads and merged by the next op
};

struct Texts {  // where keys and values of a step's texts lie, if they attend both ways: in pages of the program itself
    const int32_t* slots;       // [tokens] as Run::slots
    const int32_t* first_page;  // [seqs]
    const int32_t* pages;       // 0, 1, 2, ...: a text's page table begins at its first page
};

struct Step {  // what kernels see
    const Run* run;
    void* const* buf;
    const Work* work;  // by index of the group size; an attention op names its index
    int threads;
    Texts texts;
};

struct Kernel {  // tiles are independent and write disjoint outputs: any thread may run any tile in any order
    int (*tiles)(const Op&, const Step&);
    void (*tile)(const Op&, const Step&, int tile, void* scratch);
};

constexpr int KV_CHUNK = 256;  // tokens; the fixed unit of the softmax's reduction order
#if defined(__AMX_BF16__)
constexpr int QUERY_TILE = 32;  // query vectors that share the loads of keys and values: two matrix tiles
#else
constexpr int QUERY_TILE = 16;
#endif
constexpr int SPLIT_TILE = 16;  // so many where chunks are spread over threads
constexpr int ROW_PAD = 32;                  // rows are padded to so many columns, with zeros by whoever writes them
constexpr int MAX_HEAD = 576;                // columns of a head
constexpr int MAX_EXPERTS = 1024, MAX_CHOSEN = 64;  // of a layer, of a row
constexpr int SCRATCH_BYTES = 1 << 20;     // per thread

// One entry per kind and type, defined beside the op.
extern const Kernel embed_kernel[2], rms_norm_kernel[2], layer_norm_kernel[2], quantise_kernel[2], linear_kernel[2],
    linear_int8_kernel[2], linear_int4_kernel[2], glu_kernel[2], activation_kernel[2], rope_store_kernel[2],
    attention_kernel[2], attention_merge_kernel[2], take_rows_kernel[2], add_kernel[2], scale_kernel[2], softcap_kernel[2],
    cast_kernel[2], scale_rows_kernel[2], route_kernel[2], align_kernel[2], gather_kernel[2], expert_sum_kernel[2],
    latent_rows_kernel[2], head_groups_kernel[2], to_stack_kernel[2], from_stack_kernel[2], gather_levels_kernel[2],
    short_conv_kernel[2], space_scan_kernel[2], delta_scan_kernel[2];
