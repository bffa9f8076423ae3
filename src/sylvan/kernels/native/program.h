// The C ABI: plain structs and pointers, no C++ types, no torch. `binding.py` mirrors it; the ops
// come from `opset.py` by way of ops.h, which is made when the library is built.
#pragma once
#include "ops.h"
#include <cstddef>
#include <cstdint>

#define SYLVAN_API extern "C" __attribute__((visibility("default")))

enum RowCount : int32_t { TOKENS, OUTPUTS };  // which run-time row count an op works on: Op::rows
enum RowType : int32_t { BF16, F32_ROWS };    // element type of rows (and KV): Op::dtype

struct OpRecord {  // an op of any kind, as programs are handed over
    alignas(Op) unsigned char bytes[sizeof(Op) + 4 * OPERAND_WORDS];
    const Op& op() const { return *reinterpret_cast<const Op*>(bytes); }
    Op& op() { return *reinterpret_cast<Op*>(bytes); }
};

struct Run {  // everything that changes from step to step
    int32_t tokens, outputs, seqs, table_stride;
    // groups of layers with a page table each (0: one); from one's slots to the next one's
    int32_t groups, slot_step;
    int64_t table_step;        // from one group's page table to the next one's
    const int32_t* ids;        // [tokens]
    const int32_t* positions;  // [tokens]
    // [groups][tokens] page * page_size + offset: where this token's KV goes
    const int32_t* slots;
    const int32_t* row_start;   // [seqs + 1] rows of request s: row_start[s] .. row_start[s + 1]
    const int32_t* kv_len;      // [seqs] tokens in the cache after this step
    const int32_t* table_row;   // [seqs] row of the page table
    const int32_t* page_table;  // [groups][rows][table_stride]
    const int32_t* out_rows;    // [outputs] rows that need logits
    // [tokens] token types; only models that have a table of them read it
    const int32_t* types;
    // [tokens] number of tokens of its request that a row sees; null: those up to the row itself
    const int32_t* row_ends;
    // where recurrent layers read and save the states of requests; null for models without states
    const int32_t* state_slots;   // [seqs]
    const int32_t* first_saves;   // [seqs + 1] of `saves`
    const int32_t* saves;         // [][2] rows of the request, and the slot of the state after them
    int64_t* profile;             // [ops] ns spent, added to; or null
    const struct Inputs* inputs;  // if set, all of the above but `profile` is derived from it first
    struct Sample* sample;        // if set, the logits are sampled afterwards
};

struct Inputs {  // a step as the scheduler describes it; the arrays of a run are derived from it
    int32_t seqs, tokens, outputs, in_flight, page_size, vocab;
    // Consecutive arrays:
    // [3][seqs] slot, first position and end position of each request
    // [outputs] request of each sampled row
    // [2][in_flight] rows whose id the previous step still samples, and their request slots
    // [tokens] ids
    const int32_t* numbers;
    int32_t* last_token;    // [slots] read here, and written once sampled
    const int32_t* shifts;  // [slots] added to the rotary positions of a request
};

// memory in pages: bytes of page p in region r begin at memory + r * region_step + p * page_step
struct PagedBytes {
    char* memory;
    int64_t regions, region_step, page_step, width;  // width: bytes of a page in one region
};

struct PackedRows {  // source rows of a matrix and their destination: see packing.py
    const char* rows;
    int64_t row_step;            // bytes
    int64_t count, cols, first;  // first: output that the first row becomes
    int64_t words;               // per output
    int32_t type, kind, group, unused;
    char* data;
    float* scale;
    int32_t* sums;
};

// a unit of attention work: query vectors (row, head of the group) first .. first + count of a
// request
struct Item {
    int32_t seq, first, count;
};

struct Work {  // the items of a step for one size of query group
    const Item* items;
    int count, chunks;  // chunks: number of chunks of the longest request
    bool split;         // chunks are spread over threads and merged by the next op
};

// keys and values of texts with bidirectional attention, in pages of the program itself
struct Texts {
    const int32_t* slots;       // [tokens] as Run::slots
    const int32_t* first_page;  // [seqs]
    const int32_t* pages;       // 0, 1, 2, ...: a text's page table begins at its first page
};

struct Step {  // the step as kernels see it
    const Run* run;
    void* const* buf;
    const Work* work;  // by index of the group size; an attention op names its index
    int threads;
    Texts texts;
};

// tiles are independent and write disjoint outputs: any thread may run any tile in any order
struct Kernel {
    int (*tiles)(const Op&, const Step&);
    void (*tile)(const Op&, const Step&, int tile, void* scratch);
};

constexpr int KV_CHUNK = 256;  // tokens; softmax is always reduced in chunks of this size
#if defined(__AMX_BF16__)
// query vectors that share the loads of keys and values: two matrix tiles
constexpr int QUERY_TILE = 32;
#else
constexpr int QUERY_TILE = 16;
#endif
constexpr int SPLIT_TILE = 16;  // tile size when chunks are spread over threads
// rows are padded with zeros to a multiple of this; the writer pads
constexpr int ROW_PAD = 32;
constexpr int MAX_HEAD = 576;                         // columns of a head
constexpr int MAX_EXPERTS = 1024, MAX_CHOSEN = 64;    // per layer, per row
constexpr int MAX_STREAMS = 8;                        // residual streams of a row
constexpr int MAX_INDEX = 256, MAX_ENTRIES = 200000;  // columns of a head, entries of a request
constexpr int SCRATCH_BYTES = 1 << 20;                // per thread

// Kernels of an op by type of rows, defined in the op's source file.
#define SYLVAN_DECLARE(name) extern const Kernel name##_kernel[2];
SYLVAN_OPS(SYLVAN_DECLARE)
#undef SYLVAN_DECLARE
