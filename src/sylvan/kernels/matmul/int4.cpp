// Int4 weights with a scale per group of inputs and column: levels [N / 16][K / 8][16][4 bytes], a
// byte holding input i of the first four in its low nibble and of the last four in its high one;
// scales [N / 16][K / group][16]. Sums within a group are exact integers; groups are added in
// order, in float32.
#include "tiling.h"

namespace {

const vu LOW = vu{} + 0x0f0f0f0fu;

template <class T> void write_row(const Linear& op, const Step& s, const Spot& spot, int i, int j,
                                  vf v) {
    write<T>(op, s, spot, i, j, v * at(op.row_scale, s)[spot.m + i]);
}

template <class T> void few_rows(const Linear& op, const Step& s, const Block& b) {
    int64_t words = op.words, xs = op.x_bytes / 4;  // words of 8 inputs
    int group = op.group, groups = int(words) * 8 / group;
    int ahead = b.ahead();
    by_registers(b, [&](Spot spot, auto high, auto wide) {
        constexpr int M = high, N = wide;
        vf total[M][N] = {};
        const uint32_t* x = at<uint32_t>(op.x, s) + spot.m * xs;
        const uint32_t* w = at<uint32_t>(op.weight, s) + spot.w * words * LANES;
        const int32_t* sums = at(op.sums, s) + spot.m * groups;
        const float* scales = at(op.col_scale, s) + spot.w * groups * LANES;
        for (int g = 0; g < groups; g++) {
            vi acc[M * N];
            unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i] = vi{}; });
            for (int k = g * group / 8; k < (g + 1) * group / 8; k++) {
                vu low[N], high[N];
                unrolled<N>([&](auto j) SYLVAN_INLINE {
                    const uint32_t* p = w + (j * words + k) * LANES;
                    vu v = load<vu>(p);
                    if (ahead) __builtin_prefetch(p + ahead);
                    low[j] = v & LOW;
                    high[j] = (v >> 4) & LOW;
                });
                unrolled<M>([&](auto i) SYLVAN_INLINE {
                    vu first = filled<vu>(x[i * xs + 2 * k]);
                    vu second = filled<vu>(x[i * xs + 2 * k + 1]);
                    unrolled<N>([&](auto j) SYLVAN_INLINE {
                        acc[i * N + j] =
                            Int4::dot(Int4::dot(acc[i * N + j], low[j], first), high[j], second);
                    });
                });
            }
            unrolled<N>([&](auto j) SYLVAN_INLINE {
                vf scale = load<vf>(scales + (int64_t(j) * groups + g) * LANES);
                unrolled<M>([&](auto i) SYLVAN_INLINE {
                    total[i][j] = fma(converted<vf>(acc[i * N + j] - 8 * sums[i * groups + g]),
                                      scale, total[i][j]);
                });
            });
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write_row<T>(op, s, spot, i, j, total[i][j]);
    });
}

#if defined(__AMX_INT8__)
constexpr float SIXTEENTH = 1.f / 16;

// Unpacks one group of 16 columns to B tiles of 16 * (level - 8): the nibble in the upper half of a
// byte, its top bit flipped. Sums stay below 2^24, so the factor 16 changes no bit. A group of 32
// fills half a tile; the rest is zero.
void unpack(const uint32_t* w, int group, char* tiles, int ahead) {
    const vu flip = vu{} + 0x88888888u, high = LOW << 4;
    for (int k = 0; k < group / 8; k++, tiles += 128) {
        vu v = load<vu>(w + k * LANES) ^ flip;
        if (ahead) __builtin_prefetch(w + k * LANES + ahead);
        store(tiles, v << 4 & high);
        store(tiles + 64, v & high);
    }
    if (group == 32) memset(tiles, 0, 512);
}

// Adds the products of some groups, `step` apart, to the sums of 16 columns and the first ROWS rows
// of a tile.
template <int ROWS> void add_groups(float* sums, const int32_t* raw, int step, const float* scales,
                                    int groups) {
    vf total[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) total[i] = load<vf>(sums + i * LANES);
    for (int g = 0; g < groups; g++) {
        vf scale = load<vf>(scales + g * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
            total[i] = fma(converted<vf>(load<vi>(raw + g * step + i * LANES)), scale, total[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) store(sums + i * LANES, total[i]);
}

struct Blocks {  // of weights, from one column block on
    const uint32_t* levels;
    const float* scales;
    int64_t words;
    int group, groups, steps;

    Blocks(const Linear& op, const Step& s, int64_t block) : words(op.words), group(op.group) {
        groups = int(words) * 8 / group;
        steps = std::max(1, group / 64);
        levels = at<uint32_t>(op.weight, s) + block * words * LANES;
        scales = at(op.col_scale, s) + block * groups * LANES;
    }
    int tile_bytes() const { return steps * 1024; }
    const float* scale(int block, int g) const {
        return scales + (int64_t(block) * groups + g) * LANES;
    }
    void unpack_to(char* tiles, int block, int g, int count, int ahead) const {
        const uint32_t* from = levels + (block * words + g * group / 8) * LANES;
        for (int i = 0; i < count; i++)
            unpack(from + i * group * 2, group, tiles + i * tile_bytes(), ahead);
    }
};

// Up to 16 rows: unpack weights as they come from memory, block by block.
template <int ROWS, class T> void one_tile(const Linear& op, const Step& s, const Block& b) {
    constexpr int BATCH = 4;  // groups
    alignas(64) char tiles[BATCH * 2048];
    alignas(64) int32_t raw[BATCH][TILE * TILE];
    int64_t xs = op.x_bytes;
    for (int n = b.n0; n < b.n1; n++) {
        alignas(64) float sums[ROWS * LANES] = {};
        Blocks w(op, s, n + b.shift);
        for (int g = 0; g < w.groups; g += BATCH) {
            int batch = std::min(BATCH, w.groups - g);
            const char* x = at<char>(op.x, s) + b.m0 * xs + g * w.group;
            w.unpack_to(tiles, 0, g, batch, b.ahead());
            for (int i = 0; i < batch; i++)
                tiles_1x1<TilesInt8>(raw[i], x + i * w.group, xs, tiles + i * w.tile_bytes(),
                                     w.steps);
            add_groups<ROWS>(sums, raw[0], TILE * TILE, w.scale(0, g), batch);
        }
        for (int i = 0; i < b.count(); i++)
            write_row<T>(op, s, {b.m0, n, n + b.shift}, i, 0,
                         load<vf>(sums + i * LANES) * SIXTEENTH);
    }
}

// More rows: tiles of 32 rows and two blocks; all rows are multiplied by a batch of groups that
// fits the L1 cache.
template <class T> void many_rows(const Linear& op, const Step& s, const Block& b) {
    constexpr int BATCH = 2;
    alignas(64) static thread_local float sums[LINEAR_ROWS / TILE][2][TILE * TILE];
    alignas(64) char tiles[2][BATCH * 2048];
    alignas(64) int32_t raw[BATCH][4][TILE * TILE];
    int64_t xs = op.x_bytes;
    for (int n = b.n0; n < b.n1; n += 2) {
        Blocks w(op, s, n + b.shift);
        memset(sums, 0, sizeof(sums[0]) * ceil_div(b.count(), TILE));
        for (int g = 0; g < w.groups; g += BATCH) {
            int batch = std::min(BATCH, w.groups - g);
            for (int j = 0; j < 2; j++) w.unpack_to(tiles[j], j, g, batch, b.ahead());
            for (int m = b.m0; m < b.m1; m += 2 * TILE) {
                int high = b.m1 - m > TILE ? 2 : 1;
                for (int i = 0; i < batch; i++) {
                    const char* x = at<char>(op.x, s) + m * xs + (g + i) * w.group;
                    const char* tile = tiles[0] + i * w.tile_bytes();
                    auto* out = reinterpret_cast<float*>(raw[i]);
                    if (high == 2)
                        tiles_2x2<TilesInt8, false>(out, x, xs, tile, sizeof(tiles[0]), w.steps);
                    else
                        tiles_1x2<TilesInt8, false>(out, x, xs, tile, sizeof(tiles[0]), w.steps);
                }
                for (int c = 0; c < 2 * high; c++)
                    add_groups<TILE>(sums[(m - b.m0) / TILE + c / 2][c % 2], raw[0][c],
                                     4 * TILE * TILE, w.scale(c % 2, g), batch);
            }
        }
        for (int i = 0; i < b.count(); i++)
            for (int j = 0; j < 2; j++)
                write_row<T>(op, s, {b.m0, n, n + b.shift}, i, j,
                             load<vf>(sums[i / TILE][j] + i % TILE * LANES) * SIXTEENTH);
    }
}
#endif

template <class T> void linear_int4(const LinearInt4& op, const Step& s, int t, void*) {
    Block b = linear_block(op, s, t);
#if defined(__AMX_INT8__)
    if (b.count() > TILE) return many_rows<T>(op, s, b);
    if (b.count() > TILE / 2) return one_tile<TILE, T>(op, s, b);
    if (b.count() > 4) return one_tile<TILE / 2, T>(op, s, b);
#endif
    few_rows<T>(op, s, b);
}

}  // namespace

const Kernel linear_int4_kernel[2] = {tiled<linear_tiles, linear_int4<bf16>>,
                                      tiled<linear_tiles, linear_int4<float>>};
