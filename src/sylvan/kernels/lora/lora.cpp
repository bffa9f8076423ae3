// LoRA: multiplies the rows of requests with an adapter by its two low-rank matrices. Shrink
// computes the inner rows A x, expand adds scale * B (A x) to y. Matrices are packed [outputs /
// 16][words of inputs][16]; if x is an id, A is a table [ids][rank].
#include "../native/amx.h"
#include "../native/kernel.h"
#include <utility>
#include <vector>

namespace lora {

struct Factors {  // of one part of a layer's outputs, for one adapter slot
    const uint32_t *down, *up;
    int32_t rank;  // 0: the adapter does not change this part
    float scale;
};

struct SlotRows {  // rows by slot
    const int32_t* table;
    const LoraTables& tables;

    SlotRows(const LoraTables& tables, const Step& s)
        : table(at(tables.slot_rows, s)), tables(tables) {}
    int count() const { return table[0]; }
    int slot(int g) const { return table[1 + 3 * g]; }
    int first(int g) const { return table[2 + 3 * g]; }
    int rows(int g) const { return table[3 + 3 * g]; }
    const int32_t* listed(int i) const { return table + 1 + 3 * tables.slots + i; }
    int slot_of(int row) const { return *listed(tables.max_tokens + row); }
};

struct Block {  // entries first .. first + count of the list of rows, or of the outputs
    int first, count;
    const int32_t* rows;     // null: the entries are the rows
    const Factors* factors;  // of the rows' slot, by part; null: no adapter

    int row(int i) const { return rows ? rows[i] : first + i; }
    bool has(int part) const { return factors && factors[part].rank; }
};

constexpr int WIDTH = 512;        // columns of y in a tile
constexpr int EXPAND_ROWS = 128;  // rows of it
constexpr int LOOKUP_ROWS = 64;

int shrink_rows(const LoraShrink& op) {
    return std::clamp(SCRATCH_BYTES / op.x_bytes / 16 * 16, 16, 64);
}

const Factors* factors_of(const LoraTables& tables, const Step& s, int slot) {
    return reinterpret_cast<const Factors*>(at(tables.factors, s)) + int64_t(slot) * tables.parts;
}

// Whether an adapter of this step changes the layer.
bool is_changed(const LoraTables& tables, const Step& s) {
    SlotRows by_slot(tables, s);
    for (int g = 0; g < by_slot.count(); g++) {
        const Factors* factors = factors_of(tables, s, by_slot.slot(g));
        if (std::any_of(factors, factors + tables.parts, [](const Factors& f) { return f.rank; }))
            return true;
    }
    return false;
}

// Divides the rows of a slot into blocks of `high` rows, and each block into `each` tiles. Sampled
// rows are blocks of one row; those outside the step have no adapters.
int block_tiles(const Op& op, const LoraTables& tables, const Step& s, int high, int each) {
    if (!is_changed(tables, s)) return 0;
    if (op.rows == OUTPUTS) return s.run->out_rows ? s.run->outputs * each : 0;
    SlotRows by_slot(tables, s);
    int tiles = 0;
    for (int g = 0; g < by_slot.count(); g++) tiles += ceil_div(by_slot.rows(g), high) * each;
    return tiles;
}
Block block(const Op& op, const LoraTables& tables, const Step& s, int b, int high) {
    SlotRows by_slot(tables, s);
    if (op.rows == OUTPUTS) {
        int slot = by_slot.slot_of(s.run->out_rows[b]);
        return {b, 1, nullptr, slot < 0 ? nullptr : factors_of(tables, s, slot)};
    }
    int g = 0;
    for (int blocks; b >= (blocks = ceil_div(by_slot.rows(g), high)); g++) b -= blocks;
    int first = by_slot.first(g) + b * high;
    return {first, std::min(high, by_slot.rows(g) - b * high), by_slot.listed(first),
            factors_of(tables, s, by_slot.slot(g))};
}

int across(const LoraExpand& op, const Step& s) {  // tiles of all parts
    int tiles = 0;
    for (int p = 0; p < op.tables.parts; p++) tiles += ceil_div(at(op.part_cols, s)[p], WIDTH);
    return tiles;
}

int shrink_tiles(const LoraShrink& op, const Step& s) {
    return block_tiles(op, op.tables, s, shrink_rows(op), op.tables.parts);
}
int lookup_tiles(const LoraLookup& op, const Step& s) {
    return block_tiles(op, op.tables, s, LOOKUP_ROWS, 1);
}
int expand_tiles(const LoraExpand& op, const Step& s) {
    return at(op.tables.slot_rows, s)[0] ? block_tiles(op, op.tables, s, EXPAND_ROWS, across(op, s))
                                         : 0;
}

// Calls f(row, block, sums) for the products of rows of x, `stride` bytes apart, with blocks of 16
// outputs, `step` words apart. Matrix tiles also read the rows up to the next multiple of 16; their
// results are dropped.
template <class E, class F>
void products(const char* x, int64_t stride, int count, const uint32_t* w, int64_t step, int blocks,
              int words, F&& f) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<E, Bf16>) {
        alignas(64) float raw[4 * TILE * TILE];
        const int steps = ceil_div(words, TILE_WORDS);
        for (int i = 0; i < BYTES_AHEAD; i += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(w) + i);
        for (int n = 0; n < blocks; n += 4) {
            const char* from = reinterpret_cast<const char*>(w + n * step);
            const int some = std::min(4, blocks - n);
            for (int m = 0; m < count; m += TILE) {
                const char* rows = x + m * stride;
                if (some == 4)
                    tiles_1x4<TilesBf16, true>(raw, rows, stride, from, step * 4, steps);
                else
                    for (int j = 0; j < some; j++)
                        tiles_1x1<TilesBf16, true>(raw + j * TILE * TILE, rows, stride,
                                                   from + j * step * 4, steps);
                const int high = std::min(TILE, count - m);
                for (int j = 0; j < some; j++)
                    for (int i = 0; i < high; i++)
                        f(m + i, n + j, load<vf>(raw + (j * TILE + i) * LANES));
            }
        }
        return;
    }
#endif
    for (int n = 0; n < blocks; n++)
        for (int m = 0; m < count; m += TILE_ROWS)
            constant<TILE_ROWS>(std::min(TILE_ROWS, count - m), [&](auto M) {
                vf acc[M][1] = {};
                multiply<E, M, 1>(acc, reinterpret_cast<const uint32_t*>(x + m * stride),
                                  stride / 4, w + n * step, 0, LANES, words,
                                  Prefetch{count <= 4 ? 384 : 0});
                for (int i = 0; i < M; i++) f(m + i, n, acc[i][0]);
            });
}

int one_tile(const LoraPairs&, const Step&) { return 1; }

// Lists the pairs of a row and an expert by adapter slot of the expert.
void pairs(const LoraPairs& op, const Step& s, int, void*) {
    const int32_t* of_step = at(op.step_rows, s);
    const int32_t* slot_of = of_step + 1 + 3 * op.slots + op.max_tokens;
    const int32_t *some = at(op.groups, s), *pair = at(op.sorted_pairs, s);
    int32_t* table = at(op.slot_rows, s);
    int32_t *group = table + 1, *listed = table + 1 + 3 * op.slots * op.num_experts, *end = listed;
    const int32_t* last = some + 1 + 3 * (of_step[0] ? some[0] : 0);
    std::vector<int32_t> next(op.slots);
    for (some++; some < last;) {
        const int owner = some[0], first = some[1];
        int stop = first;
        for (; some < last && some[0] == owner; some += 3) stop += some[2];
        std::fill(next.begin(), next.end(), 0);
        for (int p = first; p < stop; p++)
            if (int slot = slot_of[pair[p] / op.top_k]; slot >= 0) next[slot]++;
        for (int slot = 0; slot < op.slots; slot++)
            if (int own = std::exchange(next[slot], int(end - listed))) {
                group[0] = owner * op.slots + slot;
                group[1] = int(end - listed);
                group[2] = own;
                group += 3;
                end += own;
            }
        for (int p = first; p < stop; p++)
            if (int slot = slot_of[pair[p] / op.top_k]; slot >= 0) listed[next[slot]++] = p;
    }
    table[0] = int(group - table - 1) / 3;
}

template <class E> void shrink(const LoraShrink& op, const Step& s, int t, void* scratch) {
    using T = typename E::row;
    const int parts = op.tables.parts, width = op.tables.width, words = op.x_bytes / 4;
    const Block b = block(op, op.tables, s, t / parts, shrink_rows(op));
    if (!b.has(t % parts)) return;
    const Factors& factors = b.factors[t % parts];
    char* x = static_cast<char*>(scratch);
    for (int i = 0; i < b.count; i++)
        memcpy(x + int64_t(i) * op.x_bytes, at<char>(op.x, s) + int64_t(b.row(i)) * op.x_bytes,
               op.x_bytes);
    const int64_t step = int64_t(parts) * width;
    T* out = at<T>(op.inner, s) + b.first * step + t % parts * width;
    const int blocks = ceil_div(factors.rank, LANES);
    products<E>(x, op.x_bytes, b.count, factors.down, int64_t(words) * LANES, blocks, words,
                [&](int m, int n, vf v) { put(out + m * step + n * LANES, v); });
    if (blocks % 2)  // expand reads whole steps of matrix tiles
        for (int m = 0; m < b.count; m++) put(out + m * step + blocks * LANES, vf{});
}

template <class E> void lookup(const LoraLookup& op, const Step& s, int t, void*) {
    using T = typename E::row;
    const int width = op.tables.width;
    const Block b = block(op, op.tables, s, t, LOOKUP_ROWS);
    if (!b.has(0)) return;
    const int rank = b.factors->rank;
    const T* table = reinterpret_cast<const T*>(b.factors->down);
    T* out = at<T>(op.inner, s) + int64_t(b.first) * width;
    for (int i = 0; i < b.count; i++, out += width) {
        int64_t id = std::clamp(s.run->ids[b.row(i)], 0, op.num_ids - 1);
        memcpy(out, table + id * rank, rank * sizeof(T));
        memset(static_cast<void*>(out + rank), 0, (width - rank) * sizeof(T));
    }
}

template <class T> void add(T* y, vf v, int n) {  // to the first n of 16
    if (n >= LANES) return put(y, get(y) + v);
    T all[LANES] = {};
    memcpy(all, y, n * sizeof(T));
    put(all, get(all) + v);
    memcpy(y, all, n * sizeof(T));
}

template <class E> void expand(const LoraExpand& op, const Step& s, int t, void*) {
    using T = typename E::row;
    const int parts = op.tables.parts, width = op.tables.width, each = across(op, s);
    const int32_t* cols = at(op.part_cols, s);
    int part = 0, rest = t % each, first = 0;  // columns of y before the part
    for (; rest >= ceil_div(cols[part], WIDTH); part++) {
        rest -= ceil_div(cols[part], WIDTH);
        first += cols[part];
    }
    const Block b = block(op, op.tables, s, t / each, EXPAND_ROWS);
    if (!b.has(part)) return;
    const Factors& factors = b.factors[part];
    const int words = ceil_div(factors.rank, E::ELEMENTS);
    const int count = std::min(WIDTH, cols[part] - rest * WIDTH);
    const int64_t step = int64_t(parts) * width;
    const T* inner = at<T>(op.inner, s) + b.first * step + part * width;
    const uint32_t* up = factors.up + int64_t(rest) * WIDTH * words;
    first += rest * WIDTH;
    products<E>(reinterpret_cast<const char*>(inner), step * sizeof(T), b.count, up,
                int64_t(words) * LANES, ceil_div(count, LANES), words, [&](int m, int n, vf v) {
                    const int64_t to = int64_t(b.row(m)) * op.y_stride + first + n * LANES;
                    if (op.f32)
                        add(at<float>(op.y, s) + to, v * factors.scale, count - n * LANES);
                    else
                        add(at<T>(op.y, s) + to, v * factors.scale, count - n * LANES);
                });
}

}  // namespace lora

const Kernel lora_shrink_kernel[2] = {tiled<lora::shrink_tiles, lora::shrink<Bf16>>,
                                      tiled<lora::shrink_tiles, lora::shrink<F32>>};
const Kernel lora_lookup_kernel[2] = {tiled<lora::lookup_tiles, lora::lookup<Bf16>>,
                                      tiled<lora::lookup_tiles, lora::lookup<F32>>};
const Kernel lora_pairs_kernel[2] = {tiled<lora::one_tile, lora::pairs>,
                                     tiled<lora::one_tile, lora::pairs>};
const Kernel lora_expand_kernel[2] = {tiled<lora::expand_tiles, lora::expand<Bf16>>,
                                      tiled<lora::expand_tiles, lora::expand<F32>>};
