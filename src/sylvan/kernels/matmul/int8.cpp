// Rows quantised to int8, and int8 weights with a scale per column: [N / 16][K / 4][16][4] int8.
#include "levels.h"
#include "tiling.h"

namespace {

// buf: x, and see levels.h; n: cols
template <class T> void quantise(const Op& op, const Step& s, int64_t r) {
    quantise_row(op, s, r, at<T>(op, s, 0) + r * stride(op.n[0]));
}

template <class T> void finish(const Op& op, const Step& s, const Spot& spot, int i, int j, vi acc) {
    vf scale = load<vf>(at<float>(op, s, COL_SCALE) + (spot.w + j) * LANES) * at<float>(op, s, ROW_SCALE)[spot.m + i];
    if (INT8_ZERO) acc -= load<vi>(at<int32_t>(op, s, SUMS) + (spot.w + j) * LANES) * INT8_ZERO;
    write<T>(op, s, spot, i, j, __builtin_convertvector(acc, vf) * scale);
}

template <class T> void linear_int8(const Op& op, const Step& s, int t, void*) {
#if defined(__AMX_INT8__)
    by_amx<TilesInt8>(op, s, linear_block(op, s, t), [&](Spot spot, int count, int cols, const float* raw) {
        for (int i = 0; i < count; i++)
            for (int j = 0; j < cols; j++)
                finish<T>(op, s, spot, i, j, load<vi>(raw + (i / TILE * cols + j) * 256 + i % TILE * 16));
    });
#else
    int64_t words = op.n[0], xs = op.n[4] / 4;
    Block b = linear_block(op, s, t);
    by_registers(b, [&](Spot spot, auto M, auto N) {
        vi acc[M][N] = {};
        const uint32_t *x = at<uint32_t>(op, s, X) + spot.m * xs, *w = at<uint32_t>(op, s, WEIGHT) + spot.w * words * LANES;
        multiply<Int8, M, N>(acc, x, xs, w, words * LANES, LANES, int(words), b.ahead());
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) finish<T>(op, s, spot, i, j, acc[i][j]);
    });
#endif
}

}  // namespace

const Kernel quantise_kernel[2] = {{row_tiles, by_rows<quantise<bf16>>}, {row_tiles, by_rows<quantise<float>>}};
const Kernel linear_int8_kernel[2] = {{linear_tiles, linear_int8<bf16>}, {linear_tiles, linear_int8<float>}};
