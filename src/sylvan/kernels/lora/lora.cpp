// Low-rank adapters: rows of some requests are also multiplied by two small matrices of their adapter. Shrink makes t = A x of
// these rows, expand adds scale * B t to y. Matrices are packed [outputs / 16][words of inputs][16].
// buf: 0 x (shrink), y (expand; updated), 1 t, 2 groups of rows, 3 factors of each slot and part
// n: 0 bytes of a row of x (shrink), elements of a row of y (expand), 1 parts, 2 columns of a part of t, 3 most groups,
// 4 whether y is float32 beside rows of the type; from 8: columns of y of each part
#include "../native/amx.h"
#include "../native/kernel.h"

namespace {

struct Factors {  // of one part of a layer in one slot
    const uint32_t *down, *up;
    int32_t rank;  // 0: the adapter does not change this part
    float scale;
};

struct Groups {  // rows by adapter
    const int32_t* table;
    int most;

    Groups(const Op& op, const Step& s) : table(at<int32_t>(op, s, 2)), most(op.n[3]) {}
    int count() const { return table[0]; }
    int slot(int g) const { return table[1 + 3 * g]; }
    int first(int g) const { return table[2 + 3 * g]; }
    int rows(int g) const { return table[3 + 3 * g]; }
    const int32_t* listed(int i) const { return table + 1 + 3 * most + i; }
};

struct Part {  // entries first .. first + count of the list of rows, and what they are multiplied by
    int first, count, number, column;
    const Factors* factors;
    const int32_t* rows;
};

constexpr int WIDTH = 512;        // columns of y in a tile
constexpr int EXPAND_ROWS = 128;  // rows of it

int shrink_rows(const Op& op) { return std::clamp(SCRATCH_BYTES / op.n[0] / 16 * 16, 16, 64); }
int across(const Op& op, int part) { return ceil_div(op.n[8 + part], WIDTH); }
int shrink_tiles_of(const Op& op) { return op.n[1]; }
int expand_tiles_of(const Op& op) {
    int tiles = 0;
    for (int p = 0; p < op.n[1]; p++) tiles += across(op, p);
    return tiles;
}

int count_tiles(const Op& op, const Step& s, int high, int each) {
    Groups groups(op, s);
    int tiles = 0;
    for (int g = 0; g < groups.count(); g++) tiles += ceil_div(groups.rows(g), high) * each;
    return tiles;
}
int shrink_tiles(const Op& op, const Step& s) { return count_tiles(op, s, shrink_rows(op), shrink_tiles_of(op)); }
int expand_tiles(const Op& op, const Step& s) { return count_tiles(op, s, EXPAND_ROWS, expand_tiles_of(op)); }

Part part_of(const Op& op, const Step& s, int t, int high, int each) {
    Groups groups(op, s);
    int g = 0, rest = t % each;
    for (t /= each; t >= ceil_div(groups.rows(g), high); g++) t -= ceil_div(groups.rows(g), high);
    int first = groups.first(g) + t * high, number = 0;
    if (each == op.n[1]) number = rest, rest = 0;  // one tile a part
    else while (rest >= across(op, number)) rest -= across(op, number++);
    const Factors* factors = at<const Factors>(op, s, 3) + int64_t(groups.slot(g)) * op.n[1] + number;
    return {first, std::min(high, groups.rows(g) - t * high), number, rest * WIDTH, factors, groups.listed(first)};
}

// Calls f(row, block, sums) for the products of rows of x, one behind the other, with blocks of 16 outputs. On machines with
// matrix tiles, rows up to the next multiple of 16 are read: whatever lies there is computed, and dropped.
template <class E, class F>
void products(const char* x, int64_t stride, int count, const uint32_t* w, int64_t step, int blocks, int words, F&& f) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<E, Bf16>) {
        alignas(64) float raw[TILE * TILE];
        for (int n = 0; n < blocks; n++)
            for (int m = 0; m < count; m += TILE) {
                tiles_1x1<TilesBf16>(raw, x + m * stride, stride, reinterpret_cast<const char*>(w + n * step), ceil_div(words, TILE_WORDS));
                for (int i = 0; i < std::min(TILE, count - m); i++) f(m + i, n, load<vf>(raw + i * LANES));
            }
        return;
    }
#endif
    for (int n = 0; n < blocks; n++)
        for (int m = 0; m < count; m += TILE_ROWS)
            constant<TILE_ROWS>(std::min(TILE_ROWS, count - m), [&](auto M) {
                vf acc[M][1] = {};
                multiply<E, M, 1>(acc, reinterpret_cast<const uint32_t*>(x + m * stride), stride / 4, w + n * step, 0, LANES, words,
                                  count <= 4 ? 384 : 0);
                for (int i = 0; i < M; i++) f(m + i, n, acc[i][0]);
            });
}

template <class E> void shrink(const Op& op, const Step& s, int t, void* scratch) {
    using T = typename E::row;
    Part part = part_of(op, s, t, shrink_rows(op), shrink_tiles_of(op));
    int rank = part.factors->rank, words = op.n[0] / 4, width = op.n[2];
    if (!rank) return;
    char* x = static_cast<char*>(scratch);
    for (int i = 0; i < part.count; i++) memcpy(x + int64_t(i) * op.n[0], at<char>(op, s, 0) + int64_t(part.rows[i]) * op.n[0], op.n[0]);
    T* out = at<T>(op, s, 1) + int64_t(part.first) * op.n[1] * width + part.number * width;
    int blocks = ceil_div(rank, LANES);
    products<E>(x, op.n[0], part.count, part.factors->down, int64_t(words) * LANES, blocks, words,
                [&](int m, int n, vf v) { put(out + int64_t(m) * op.n[1] * width + n * LANES, v); });
    if (blocks % 2)  // expand reads whole steps of matrix tiles
        for (int m = 0; m < part.count; m++) put(out + int64_t(m) * op.n[1] * width + blocks * LANES, vf{});
}

template <class T> void add(T* y, vf v, int n) {  // to the first n of 16
    if (n >= LANES) return put(y, get(y) + v);
    T all[LANES] = {};
    memcpy(all, y, n * sizeof(T));
    put(all, get(all) + v);
    memcpy(y, all, n * sizeof(T));
}

template <class E> void expand(const Op& op, const Step& s, int t, void*) {
    using T = typename E::row;
    Part part = part_of(op, s, t, EXPAND_ROWS, expand_tiles_of(op));
    int rank = part.factors->rank, words = ceil_div(rank, E::ELEMENTS), width = op.n[2], before = 0;
    if (!rank) return;
    for (int p = 0; p < part.number; p++) before += op.n[8 + p];
    int cols = std::min(WIDTH, op.n[8 + part.number] - part.column);
    const T* inner = at<T>(op, s, 1) + int64_t(part.first) * op.n[1] * width + part.number * width;
    const uint32_t* up = part.factors->up + int64_t(part.column / LANES) * words * LANES;
    float scale = part.factors->scale;
    products<E>(reinterpret_cast<const char*>(inner), int64_t(op.n[1]) * width * sizeof(T), part.count, up, int64_t(words) * LANES,
                ceil_div(cols, LANES), words, [&](int m, int n, vf v) {
        int64_t to = int64_t(part.rows[m]) * op.n[0] + before + part.column + n * LANES;
        if (op.n[4]) add(at<float>(op, s, 0) + to, v * scale, cols - n * LANES);
        else add(at<T>(op, s, 0) + to, v * scale, cols - n * LANES);
    });
}

}  // namespace

const Kernel lora_shrink_kernel[2] = {{shrink_tiles, shrink<Bf16>}, {shrink_tiles, shrink<F32>}};
const Kernel lora_expand_kernel[2] = {{expand_tiles, expand<Bf16>}, {expand_tiles, expand<F32>}};
