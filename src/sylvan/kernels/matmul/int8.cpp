// Rows quantised to int8, and int8 weights with a scale per column: [N / 16][K / 4][16][4] int8.
#include "levels.h"
#include "tiling.h"

namespace {

template <class T> void quantise(const Quantise& op, const Step& s, int64_t r) {
    quantise_row(op.quantised, op.cols, s, r, at<T>(op.x, s) + r * stride(op.cols));
}

constexpr int BY_VECTORS_INT8 = 4;  // rows; that few are faster with vectors than with matrix tiles

// `zero`: the offset added to the levels of x.
template <class T> void finish(const Linear& op, const Step& s, const Spot& spot, int i, int j,
                               vi acc, int zero) {
    vf scale =
        load<vf>(at(op.col_scale, s) + (spot.w + j) * LANES) * at(op.row_scale, s)[spot.m + i];
    if (zero) acc -= load<vi>(at(op.sums, s) + (spot.w + j) * LANES) * zero;
    write<T>(op, s, spot, i, j, converted<vf>(acc) * scale);
}

template <class T> void by_vectors(const Linear& op, const Step& s, const Block& b,
                                   const uint32_t* x, int64_t xs, int zero) {
    int64_t words = op.words;
    by_registers(b, [&](Spot spot, auto M, auto N) {
        vi acc[M][N] = {};
        const uint32_t* w = at<uint32_t>(op.weight, s) + spot.w * words * LANES;
        multiply<Int8, M, N>(acc, x + (spot.m - b.m0) * xs, xs, w, words * LANES, LANES, int(words),
                             b.prefetch(spot.m, N, words * LANES));
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) finish<T>(op, s, spot, i, j, acc[i][j], zero);
    });
}

template <class T> void linear_int8(const LinearInt8& op, const Step& s, int t,
                                    [[maybe_unused]] void* scratch) {
    Block b = linear_block(op, s, t);
    int64_t xs = op.x_bytes / 4;
    const uint32_t* x = at<uint32_t>(op.x, s) + b.m0 * xs;
#if defined(__AMX_INT8__)
    // vectors multiply unsigned levels
    if (b.count() <= BY_VECTORS_INT8 && b.count() * xs * 4 <= SCRATCH_BYTES) {
        auto* unsigned_levels = static_cast<uint32_t*>(scratch);
        for (int64_t i = 0; i < b.count() * xs; i += LANES)
            store(unsigned_levels + i, load<vu>(x + i) ^ 0x80808080u);
        return by_vectors<T>(op, s, b, unsigned_levels, xs, 128);
    }
    by_amx<TilesInt8>(op, s, b, [&](Spot spot, int count, int cols, const float* raw) {
        for (int i = 0; i < count; i++)
            for (int j = 0; j < cols; j++)
                finish<T>(op, s, spot, i, j,
                          load<vi>(raw + (i / TILE * cols + j) * 256 + i % TILE * 16), 0);
    });
#else
    by_vectors<T>(op, s, b, x, xs, INT8_ZERO);
#endif
}

}  // namespace

const Kernel quantise_kernel[2] = {per_row<quantise<bf16>>, per_row<quantise<float>>};
const Kernel linear_int8_kernel[2] = {tiled<linear_tiles, linear_int8<bf16>>,
                                      tiled<linear_tiles, linear_int8<float>>};
