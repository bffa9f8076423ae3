// Checks the operands of a program once, before its first run: kernels trust them.
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
    int32_t most_rows[2];  // by RowCount

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
    return int64_t(memory.most_rows[op.rows]) * std::max(1, op.times);
}

// Bytes that a buffer needs at least; -1: a count is not positive
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

// Sizes that several operands of an op determine together.
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
    int64_t rows = grouped ? memory.most_rows[op.rows] : rows_of(op, memory);
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

// Whether a program of these ops can run over entries of so many bytes (0: bound later) with up to
// so many rows; otherwise `why` says which operand of which op is wrong.
SYLVAN_API int sylvan_program_check(const OpRecord* ops, int n_ops, const int64_t* bytes, int n_buf,
                                    int tokens, int outputs, char* why, int size) {
    Memory memory{bytes, n_buf, {tokens, outputs}};
    Reason reason{why, size};
    for (int i = 0; i < n_ops; i++)
        if (!check(ops[i], memory, reason)) return 0;
    return 1;
}
