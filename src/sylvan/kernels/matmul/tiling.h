// Cuts a linear layer into tiles and places the results. Columns come in blocks of 16, an even
// number of them.
#pragma once
#include "../native/amx.h"
#include "../native/kernel.h"

// maximum rows of a tile; consecutive tiles have the same rows
constexpr int LINEAR_ROWS = HAS_TILES ? 256 : 128;
constexpr int TILE_BYTES = 1 << 20;  // of rows in a tile, sized for the L2 cache
// up to this many rows, reading the weights takes longest: use wider tiles
constexpr int FEW_ROWS = HAS_TILES ? 32 : std::max(4, TILE_ROWS);

// levels of the tree that sums products over parts of the inputs: at most 8 parts
constexpr int PART_LEVELS = 4;
constexpr int WIDEST = 16;  // column blocks of a tile, at most

static inline int linear_rows(const Linear& op) {
    return std::clamp(TILE_BYTES / op.x_bytes / 32 * 32, 64, LINEAR_ROWS);
}
static inline int linear_width(const Linear& op, const Step& s) {  // column blocks of a tile
    if (op.groups.present()) return 4;
    if (rows(op, s) > FEW_ROWS) return 2;
    int width = WIDEST;  // long sequential reads are fast, but every thread needs tiles
    while (width > 4 && op.outputs / LANES < 16 * s.threads * width) width /= 2;
    return width;
}
static inline int linear_tiles(const Linear& op, const Step& s) {
    const int32_t* groups = at(op.groups, s);
    return ceil_div(op.outputs / LANES, linear_width(op, s)) *
           (groups ? groups[0] : ceil_div(rows(op, s), linear_rows(op)));
}

// rows m0 .. m1, column blocks n0 .. n1; column block n is block n + shift of the weights
struct Block {
    int m0, m1, n0, n1;
    int64_t shift, x, out;  // x: bytes into a row; out: columns into one
    int count() const { return m1 - m0; }
    // prefetch distance in words; hides memory latency if weights are read once
    int ahead() const { return count() <= 32 ? 384 : 0; }
    // Only the first rows of a tile read its weights from memory; the others find them in L2. Near
    // the end of `wide` blocks of `words` words, the prefetch continues with the next blocks.
    Prefetch prefetch(int m, int wide, int64_t words) const {
        return m == m0 ? Prefetch{768, (wide - 1) * words} : Prefetch{};
    }
};
static inline Block linear_block(const Linear& op, const Step& s, int t) {
    int width = linear_width(op, s), blocks = op.outputs / LANES;
    if (const int32_t* groups = at(op.groups, s)) {
        int tiles = ceil_div(blocks, width), n0 = t % tiles * width;
        const int32_t* group = groups + 1 + t / tiles * 3;
        return {group[1],
                group[1] + group[2],
                n0,
                std::min(n0 + width, blocks),
                int64_t(group[0]) * blocks,
                int64_t(group[0]) * op.x_head_step,
                int64_t(group[0]) * op.out_head_step};
    }
    int high = linear_rows(op), n_tiles = ceil_div(blocks, width), m0 = t / n_tiles * high;
    int n0 = t % n_tiles * width;
    return {m0, std::min(m0 + high, rows(op, s)), n0, std::min(n0 + width, blocks), 0, 0, 0};
}

// first row and first column block of a product, that block in the weights, and the first column of
// out
struct Spot {
    int64_t m, n, w, out = 0;
};

// Calls f(spot, rows as a constant, blocks as a constant) with what fits the registers.
template <class F> void by_registers(const Block& b, F&& f) {
    bool few = b.count() <= 4;
    int high = few ? std::min(4, TILE_ROWS) : TILE_ROWS;
    int wide = few ? std::clamp(FEW_VECTORS / std::min(high, b.count()), 1, 4) : TILE_COLS;
    for (int n = b.n0; n < b.n1;) {
        int cols = std::min(wide, b.n1 - n);
        for (int m = b.m0; m < b.m1; m += high) {
            int count = std::min(high, b.m1 - m);
            Spot at{m, n, n + b.shift, b.out};
            if (FEW_VECTORS >= 4 && cols == 4) {
                if constexpr (FEW_VECTORS >= 4)
                    constant<std::min(4, TILE_ROWS)>(
                        count, [&](auto M) { f(at, M, std::integral_constant<int, 4>{}); });
            } else
                constant<TILE_ROWS>(
                    count, [&](auto M) { constant<2>(cols, [&](auto N) { f(at, M, N); }); });
        }
        n += cols;
    }
}

// The result of row i and column block j of a product.
template <class T> static inline void write(const Linear& op, const Step& s, const Spot& spot,
                                            int i, int j, vf v) {
    if (const float* bias = at(op.bias, s)) v += load<vf>(bias + (spot.w + j) * LANES);
    int64_t to = (spot.m + i) * op.out_stride + spot.out + (spot.n + j) * LANES;
    if (op.out_f32)
        put(at<float>(op.out, s) + to, v);
    else
        put(at<T>(op.out, s) + to, v);
}

#if defined(__AMX_BF16__)
// Calls f(spot, rows, blocks, raw tiles) for every product of 16 rows with 2 or 4 blocks, or of 32
// rows with 2. Results of rows beyond the last are dropped; buffers are long enough to read them.
template <class D, bool STREAM, class F> void by_tiles(const Linear& op, const Step& s,
                                                       const Block& b, F&& f) {
    constexpr int RAW = 4 * TILE * TILE;
    alignas(64) float raw[RAW], sums[PART_LEVELS][RAW];
    int64_t xs = op.x_bytes, ws = int64_t(op.words) * 64;
    const char *rows = at<char>(op.x, s) + b.x, *weights = at<char>(op.weight, s) + b.shift * ws;
    int steps = op.words / TILE_WORDS / op.parts;
    for (int n = b.n0; n < b.n1;) {
        int cols = b.m1 - b.m0 <= TILE && b.n1 - n >= 4 ? 4 : 2;
        for (int m = b.m0; m < b.m1;) {
            int count = std::min(b.m1 - m, cols == 4 ? TILE : 2 * TILE);
            for (int part = 0; part < op.parts; part++) {  // added as `multiply_parts` does
                const char* x = rows + int64_t(part) * steps * 64;
                const char* w = weights + int64_t(part) * steps * 1024;
                if (cols == 4)
                    tiles_1x4<D, STREAM>(raw, x + m * xs, xs, w + n * ws, ws, steps);
                else if (count <= TILE)
                    tiles_1x2<D, STREAM>(raw, x + m * xs, xs, w + n * ws, ws, steps);
                else
                    tiles_2x2<D, STREAM>(raw, x + m * xs, xs, w + n * ws, ws, steps);
                if (op.parts == 1) break;
                int level = 0;
                for (; part >> level & 1; level++)
                    for (int i = 0; i < RAW; i += LANES)
                        store(raw + i, load<vf>(sums[level] + i) + load<vf>(raw + i));
                memcpy(sums[level], raw, sizeof raw);
            }
            f(Spot{m, n, n + b.shift, b.out}, count, cols, raw);
            m += count;
        }
        n += cols;
    }
}
template <class D, class F> void by_amx(const Linear& op, const Step& s, const Block& b, F&& f) {
    if (b.ahead())
        by_tiles<D, true>(op, s, b, f);
    else
        by_tiles<D, false>(op, s, b, f);
}
#endif
