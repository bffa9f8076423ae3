// Checks the operands of a program once, before its first run; kernels do not check them again.
#include "kernel.h"
#include <cstdio>
#include <cstring>
#include <iterator>

namespace {

struct OpRules {
    const char* name;
    const OperandRule* rules;
    int count;
};

#define SYLVAN_ENTRY(name) {#name, name##_rules, int(std::size(name##_rules))},
const OpRules op_rules[N_KINDS] = {SYLVAN_OPS(SYLVAN_ENTRY)};
#undef SYLVAN_ENTRY

struct Memory {  // of the entries of the buffer table; 0 bytes: bound later
    const int64_t* bytes;
    int count;
    int32_t max_rows[2];  // by RowCount

    bool holds(int32_t entry, int64_t needed) const {
        return entry < 0 || !bytes[entry] || bytes[entry] >= needed;
    }
};

struct Reason {  // why an op is refused
    char* text;
    int size;

    template <class... A> bool say(const char* format, A... parts) {
        std::snprintf(text, size_t(size), format, parts...);
        return false;
    }
};

int64_t rows_of(const Op& op, const Memory& memory) {
    return int64_t(memory.max_rows[op.rows]) * std::max(1, op.times);
}

// Minimum bytes of a buffer; -1: a count is not positive
int64_t needed(const OperandRule& rule, const Op& op, const int32_t* words, const Memory& memory) {
    int64_t numbers = 1;
    for (int32_t word : rule.words) {
        if (word < 0) continue;
        if (words[word] < 1) return -1;
        numbers *= words[word];
    }
    if (rule.padded) numbers = (numbers + ROW_PAD - 1) / ROW_PAD * ROW_PAD;
    int64_t bytes = rule.bytes ? rule.bytes : op.dtype == BF16 ? 2 : 4;
    return numbers * bytes * (rule.per_row ? rows_of(op, memory) : 1);
}

bool check_operand(const OperandRule& rule, const Op& op, const int32_t* words, int place,
                   const Memory& memory, Reason& why) {
    int32_t value = words[place];
    const char *kind = op_rules[op.kind].name, *name = rule.name;
    if (rule.rule == Rule::NUMBER) return true;
    if (rule.rule == Rule::CHOICE)
        return (value >= 0 && value < rule.choices) ||
               why.say("%s: %s is %d of %d choices", kind, name, value, rule.choices);
    if (value < 0) {
        bool absent = value == -1 && rule.rule == Rule::OPTIONAL;
        return absent || why.say("%s: %s is missing", kind, name);
    }
    if (value >= memory.count)
        return why.say("%s: %s is entry %d of %d", kind, name, value, memory.count);
    if (rule.bytes < 0) return true;
    int64_t bytes = needed(rule, op, words, memory);
    if (bytes < 0) return why.say("%s: %s has no columns", kind, name);
    return memory.holds(value, bytes) ||
           why.say("%s: %s has %lld bytes where %lld are needed", kind, name,
                   static_cast<long long>(memory.bytes[value]), static_cast<long long>(bytes));
}

// Checks sizes that several operands of an op determine together.
bool check_pages(const KVPages& kv, const char* name, Reason& why) {
    if (kv.num_kv_heads < 1 || kv.num_heads < 1 || kv.num_heads % kv.num_kv_heads)
        return why.say("%s: %d query heads for %d KV heads", name, kv.num_heads, kv.num_kv_heads);
    int widest = std::max(kv.head_dim, kv.value_dim);
    if (std::min(kv.head_dim, kv.value_dim) < 1 || widest > MAX_HEAD)
        return why.say("%s: heads of %d columns, of 1 to %d", name, widest, MAX_HEAD);
    return kv.page_size > 0 || why.say("%s: pages of %d tokens", name, kv.page_size);
}

bool check_qkv(const Op& op, Buf<void> qkv, const KVPages& kv, const Memory& memory, Reason& why) {
    const char* name = op_rules[op.kind].name;
    if (!check_pages(kv, name, why)) return false;
    int heads = kv.num_heads + kv.num_kv_heads;
    int64_t row = stride(heads * kv.head_dim + kv.num_kv_heads * kv.value_dim);
    return memory.holds(qkv.index, rows_of(op, memory) * row * (op.dtype == BF16 ? 2 : 4)) ||
           why.say("%s: qkv has too few columns for its heads", name);
}

bool check_attention(const Attention& op, const Memory& memory, Reason& why) {
    const char* name = op_rules[op.kind].name;
    if (!check_qkv(op, op.qkv, op.kv, memory, why)) return false;
    const BlockMask& mask = op.blocks;
    if (mask.size < 0 || mask.near < 1 || mask.stride < 1 || mask.step < 0 || mask.first_head < 0)
        return why.say("%s: blocks of %d tokens, %d near ones, one of %d far ones", name, mask.size,
                       mask.near, mask.stride);
    int64_t biases = int64_t(op.kv.num_heads) * op.distances;
    if (op.biases.present() && (op.distances < 1 || !memory.holds(op.biases.index, biases * 4)))
        return why.say("%s: biases has fewer numbers than %d heads times %d distances", name,
                       op.kv.num_heads, op.distances);
    return memory.holds(op.parts.index, int64_t(op.parts_mib) << 20) ||
           why.say("%s: parts has less than %d MiB", name, op.parts_mib);
}

bool check_rope(const RopeStore& op, const Memory& memory, Reason& why) {
    if (!check_qkv(op, op.qkv, op.kv, memory, why)) return false;
    bool fits = op.rotary_dim >= 0 && op.rotary_dim % 2 == 0 && op.rotary_dim <= op.kv.head_dim;
    if (!fits || (op.rotary_dim && !op.cos_sin.present()))
        return why.say("rope_store: %d rotary columns of heads of %d", op.rotary_dim,
                       op.kv.head_dim);
    return true;
}

bool check_linear(const Linear& op, const Memory& memory, Reason& why) {
    const char* name = op_rules[op.kind].name;
    if (op.words < 1 || op.x_bytes < 1) return why.say("%s: x has no columns", name);
    bool grouped = op.groups.present();  // then rows may be read and written in place
    int64_t rows = grouped ? memory.max_rows[op.rows] : rows_of(op, memory);
    if (!memory.holds(op.x.index, rows * op.x_bytes))
        return why.say("%s: x has fewer rows than are read", name);
    int bytes = op.dtype == BF16 && !op.out_f32 ? 2 : 4;
    if (!grouped && !memory.holds(op.out.index, rows * stride(op.outputs) * bytes))
        return why.say("%s: out has no memory for %d outputs", name, op.outputs);
    int64_t packed = int64_t(round_up(op.outputs, LANES)) * op.words * 4;
    return op.kind == LINEAR_CODED || memory.holds(op.weight.index, packed) ||
           why.say("%s: weight is smaller than %d outputs of %d words", name, op.outputs, op.words);
}

bool check_route(const Route& op, Reason& why) {
    bool chosen = op.top_k >= 1 && op.top_k <= std::min(op.num_experts, MAX_CHOSEN);
    if (!chosen || op.num_experts > MAX_EXPERTS)
        return why.say("route: %d of %d experts, at most %d of %d", op.top_k, op.num_experts,
                       MAX_CHOSEN, MAX_EXPERTS);
    bool even = op.groups < 2 || op.num_experts % op.groups == 0;
    return even || why.say("route: %d experts in %d groups", op.num_experts, op.groups);
}

bool check_heads(const Op& op, int cols, int rotary_dim, Reason& why) {
    const char* name = op_rules[op.kind].name;
    if (cols < 1 || cols > MAX_HEAD) return why.say("%s: heads of %d columns", name, cols);
    bool fits = rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= cols;
    return fits || why.say("%s: %d rotary columns of heads of %d", name, rotary_dim, cols);
}

bool check_tokens(const Op& op, const TokenRows& tokens, int cols, Reason& why) {
    bool fits = cols > 0 && cols <= tokens.width && tokens.page_size > 0;
    return fits || why.say("%s: %d columns in pages of %d rows of %d", op_rules[op.kind].name, cols,
                           tokens.page_size, tokens.width);
}

bool check_entries(const Op& op, const EntryRows& entries, Reason& why) {
    bool even = entries.block > 0 && entries.rate >= entries.block && entries.width > 0 &&
                entries.width % entries.block == 0 && entries.column >= 0;
    if (!even)
        return why.say("%s: entries of %d columns over %d of %d tokens", op_rules[op.kind].name,
                       entries.width, entries.block, entries.rate);
    return check_tokens(op, entries.tokens, entries.column + entries.width / entries.block, why);
}

bool check_choice(const EntryScores& op, const Memory& memory, Reason& why) {
    const char* name = op_rules[op.kind].name;
    if (!check_entries(op, op.entries, why)) return false;
    int cols = op.entries.width;
    if (cols > MAX_INDEX || op.top_k < 1 || op.num_heads < 1)
        return why.say("%s: %d heads of %d columns choose %d", name, op.num_heads, cols, op.top_k);
    int64_t row = stride(op.num_heads * cols) * (op.dtype == BF16 ? 2 : 4);
    if (!memory.holds(op.q.index, rows_of(op, memory) * row))
        return why.say("%s: q has too few columns for its heads", name);
    return memory.holds(op.scores.index, int64_t(op.scores_mib) << 20) ||
           why.say("%s: scores has less than %d MiB", name, op.scores_mib);
}

bool check_scan(const EntryScan& op, const Memory& memory, Reason& why) {
    int parts = op.overlaps ? 2 : 1;
    int64_t bytes = rows_of(op, memory) * stride(parts * op.cols) * 4;
    bool held = memory.holds(op.values.index, bytes) && memory.holds(op.logits.index, bytes);
    bool fits = op.rate > 0 && op.bias_stride >= parts * op.cols && held;
    return fits || why.say("entry_scan: %d columns of entries of %d tokens", op.cols, op.rate);
}

bool check_streams(const StreamCollapse& op, const Memory& memory, Reason& why) {
    int count = op.num_streams, mixed = count * (2 + count);
    bool fits = count >= 1 && count <= MAX_STREAMS && op.cols % LANES == 0 &&
                op.outputs == (op.mix.present() ? mixed : count);
    int64_t row = stride(count + count * count) * 4;
    return (fits && memory.holds(op.mix.index, rows_of(op, memory) * row)) ||
           why.say("stream_collapse: %d streams of %d columns, %d weights", count, op.cols,
                   op.outputs);
}

bool check_compressed(const CompressedAttention& op, Reason& why) {
    if (!check_heads(op, op.head_dim, op.rotary_dim, why)) return false;
    if (!check_tokens(op, op.tokens, op.head_dim, why)) return false;
    if (op.window < 1 || (op.chosen.present() && op.top_k < 1))
        return why.say("compressed_attention: a window of %d tokens, %d entries", op.window,
                       op.top_k);
    if (!op.entries.rate) return true;
    return check_entries(op, op.entries, why) &&
           (op.entries.width == op.head_dim ||
            why.say("compressed_attention: entries of %d columns for heads of %d", op.entries.width,
                    op.head_dim));
}

bool check_together(const Op& op, const Memory& memory, Reason& why) {
    switch (op.kind) {
    case ATTENTION:
    case ATTENTION_MERGE:
        return check_attention(static_cast<const Attention&>(op), memory, why);
    case ROPE_STORE:
        return check_rope(static_cast<const RopeStore&>(op), memory, why);
    case LINEAR:
    case LINEAR_INT8:
    case LINEAR_INT4:
        return check_linear(static_cast<const Linear&>(op), memory, why);
    case ROUTE:
        return check_route(static_cast<const Route&>(op), why);
    case TURN_HEADS: {
        const auto& turn = static_cast<const TurnHeads&>(op);
        return check_heads(op, turn.head_dim, turn.rotary_dim, why);
    }
    case KEY_STORE: {
        const auto& store = static_cast<const KeyStore&>(op);
        return check_heads(op, store.cols, store.rotary_dim, why) &&
               check_tokens(op, store.tokens, store.cols, why);
    }
    case ENTRY_SCAN:
        return check_scan(static_cast<const EntryScan&>(op), memory, why);
    case ENTRY_STORE: {
        const auto& store = static_cast<const EntryStore&>(op);
        return check_heads(op, store.cols, store.rotary_dim, why) &&
               check_entries(op, store.entries, why);
    }
    case ENTRY_SCORES:
    case ENTRY_CHOICE:
        return check_choice(static_cast<const EntryScores&>(op), memory, why);
    case COMPRESSED_ATTENTION:
        return check_compressed(static_cast<const CompressedAttention&>(op), why);
    case STREAM_COLLAPSE:
        return check_streams(static_cast<const StreamCollapse&>(op), memory, why);
    default:
        return true;
    }
}

bool check(const OpRecord& record, const Memory& memory, Reason& why) {
    const Op& op = record.op();
    if (op.kind < 0 || op.kind >= N_KINDS) return why.say("op %d of %d", op.kind, int(N_KINDS));
    const OpRules& known = op_rules[op.kind];
    if (op.rows < TOKENS || op.rows > OUTPUTS || op.dtype < BF16 || op.dtype > F32_ROWS)
        return why.say("%s: rows %d of type %d", known.name, op.rows, op.dtype);
    int32_t words[OPERAND_WORDS];
    std::memcpy(words, record.bytes + sizeof(Op), sizeof(words));
    for (int i = 0; i < known.count; i++)
        if (!check_operand(known.rules[i], op, words, i, memory, why)) return false;
    return check_together(op, memory, why);
}

}  // namespace

// Returns whether a program of these ops can run: `bytes` are the sizes of the buffer-table entries
// (0: bound later), for steps of up to the given numbers of rows. Otherwise `why` names the op and
// the operand.
SYLVAN_API int sylvan_program_check(const OpRecord* ops, int n_ops, const int64_t* bytes, int n_buf,
                                    int tokens, int outputs, char* why, int size) {
    Memory memory{bytes, n_buf, {tokens, outputs}};
    Reason reason{why, size};
    for (int i = 0; i < n_ops; i++)
        if (!check(ops[i], memory, reason)) return 0;
    return 1;
}
