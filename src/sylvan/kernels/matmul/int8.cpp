// Rows quantised to int8 one by one, and int8 weights with a scale per column: [N / 16][K / 4][16][4] int8.
#include "tiling.h"

namespace {

// buf: x, levels, scale [rows], sums int32 [rows][groups] or none; n: cols, group, zero point wanted (1), padded cols
template <class T> void quantise(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0], group = op.n[1], zero = op.n[2] ? INT8_ZERO : 0, padded = op.n[3];
    const T* x = at<T>(op, s, 0) + r * stride(cols);
    uint8_t* q = at<uint8_t>(op, s, 1) + int64_t(r) * padded;
    vf top{};
    for (int i = 0; i < stride(cols); i += LANES) top = max(top, abs(get(x + i)));
    float m = largest(top);
    at<float>(op, s, 2)[r] = m / 127.f;
    vf inverse = splat(m > 0 ? 127.f / m : 0.f), magic = splat(12582912.f);
    for (int i = 0; i < stride(cols); i += LANES) {
        vi v = (vi)(get(x + i) * inverse + magic) - (vi)magic + zero;
        store(q + i, __builtin_convertvector(v, vb));
    }
    memset(q + stride(cols), zero, padded - stride(cols));
    if (int32_t* sums = at<int32_t>(op, s, 3))
        for (int g = 0; g < padded / group; g++) {
            int32_t total = 0;
            for (int i = 0; i < group; i++) total += int8_t(q[g * group + i]);
            sums[r * (padded / group) + g] = total;
        }
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
