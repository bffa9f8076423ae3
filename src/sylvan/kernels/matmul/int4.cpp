// Int4 weights with a scale per group of inputs and column: levels [N / 16][K / 8][16][4 bytes], a byte holding input
// i of the first four in its low nibble and of the last four in its high one; scales [N / 16][K / group][16].
// Sums within a group are exact integers; groups are added in order, in float32.
#include "tiling.h"

namespace {

const vu LOW = vu{} + 0x0f0f0f0fu;

template <class T> void write_row(const Op& op, const Step& s, const Spot& spot, int i, int j, vf v) {
    write<T>(op, s, spot, i, j, v * at<float>(op, s, ROW_SCALE)[spot.m + i]);
}

template <class T> void few_rows(const Op& op, const Step& s, const Block& b) {
    int64_t words = op.n[0], xs = op.n[4] / 4;  // words of 8 inputs
    int group = op.n[3], groups = int(words) * 8 / group;
    int ahead = b.ahead();
    by_registers(b, [&](Spot spot, auto M, auto N) {
        vf total[M][N] = {};
        const uint32_t *x = at<uint32_t>(op, s, X) + spot.m * xs, *w = at<uint32_t>(op, s, WEIGHT) + spot.w * words * LANES;
        const int32_t* sums = at<int32_t>(op, s, SUMS) + spot.m * groups;
        const float* scales = at<float>(op, s, COL_SCALE) + spot.w * groups * LANES;
        for (int g = 0; g < groups; g++) {
            vi acc[M][N] = {};
            for (int k = g * group / 8; k < (g + 1) * group / 8; k++) {
                vu low[N], high[N];
                for (int j = 0; j < N; j++) {
                    const uint32_t* p = w + (j * words + k) * LANES;
                    vu v = load<vu>(p);
                    if (ahead) __builtin_prefetch(p + ahead);
                    low[j] = v & LOW, high[j] = (v >> 4) & LOW;
                }
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < N; j++) {
                        acc[i][j] = Int4::dot(acc[i][j], low[j], vu{} + x[i * xs + 2 * k]);
                        acc[i][j] = Int4::dot(acc[i][j], high[j], vu{} + x[i * xs + 2 * k + 1]);
                    }
            }
            for (int j = 0; j < N; j++) {
                vf scale = load<vf>(scales + (int64_t(j) * groups + g) * LANES);
                for (int i = 0; i < M; i++)
                    total[i][j] = fma(__builtin_convertvector(acc[i][j] - 8 * sums[i * groups + g], vf), scale, total[i][j]);
            }
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write_row<T>(op, s, spot, i, j, total[i][j]);
    });
}

#if defined(__AMX_INT8__)
typedef int8_t v64 __attribute__((vector_size(64)));

// One group of 16 columns as B tiles of levels - 8; a group of 32 is half a tile, the rest zero.
void unpack(const uint32_t* w, int group, uint32_t* tiles) {
    for (int k = 0; k < group / 8; k++) {
        vu v = load<vu>(w + k * LANES);
        store(tiles + 2 * k * LANES, (v64)(v & LOW) - 8), store(tiles + (2 * k + 1) * LANES, (v64)((v >> 4) & LOW) - 8);
    }
    for (int k = group / 4; k < TILE_WORDS; k++) store(tiles + k * LANES, vu{});
}

template <class T> void many_rows(const Op& op, const Step& s, const Block& b) {
    alignas(64) static thread_local float total[LINEAR_ROWS][2 * LANES];
    alignas(64) uint32_t tiles[2][2 * TILE_WORDS * LANES];
    alignas(64) int32_t raw[2][TILE * TILE];
    int64_t words = op.n[0], xs = op.n[4];
    int group = op.n[3], groups = int(words) * 8 / group, steps = std::max(1, group / 64);
    for (int n = b.n0; n < b.n1; n += 2) {
        memset(total, 0, sizeof(total));
        for (int g = 0; g < groups; g++) {
            const uint32_t* w = at<uint32_t>(op, s, WEIGHT) + ((n + b.shift) * words + g * group / 8) * LANES;
            const float* scales = at<float>(op, s, COL_SCALE) + ((n + b.shift) * groups + g) * LANES;
            vf scale[2] = {load<vf>(scales), load<vf>(scales + int64_t(groups) * LANES)};
            unpack(w, group, tiles[0]), unpack(w + words * LANES, group, tiles[1]);
            for (int m = b.m0; m < b.m1; m += TILE) {
                const char* x = at<char>(op, s, X) + m * xs + g * group;
                tile_zero<0>(), tile_zero<1>();
                for (int k = 0; k < steps; k++) {
                    tile_load<4>(x + k * 64, xs), tile_load<6>(tiles[0] + k * 256, 64), tile_load<7>(tiles[1] + k * 256, 64);
                    TilesInt8::dot<0, 4, 6>(), TilesInt8::dot<1, 4, 7>();
                }
                tile_store<0>(raw[0], 64), tile_store<1>(raw[1], 64);
                for (int i = 0, count = std::min(TILE, b.m1 - m); i < count; i++)
                    for (int j = 0; j < 2; j++) {
                        float* sum = total[m - b.m0 + i] + j * LANES;
                        store(sum, fma(__builtin_convertvector(load<vi>(raw[j] + i * TILE), vf), scale[j], load<vf>(sum)));
                    }
            }
        }
        Spot spot{b.m0, n, n + b.shift};
        for (int i = 0; i < b.count(); i++)
            for (int j = 0; j < 2; j++) write_row<T>(op, s, spot, i, j, load<vf>(total[i] + j * LANES));
    }
}
#endif

template <class T> void linear_int4(const Op& op, const Step& s, int t, void*) {
    Block b = linear_block(op, s, t);
#if defined(__AMX_INT8__)
    if (b.count() > 4) return many_rows<T>(op, s, b);
#endif
    few_rows<T>(op, s, b);
}

}  // namespace

const Kernel linear_int4_kernel[2] = {{linear_tiles, linear_int4<bf16>}, {linear_tiles, linear_int4<float>}};
