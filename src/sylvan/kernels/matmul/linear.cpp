// Dense weights, packed [N / 16][words of K][16], a word being two bf16 or one float32.
#include "tiling.h"

namespace {

// `multiply` over equal parts of the inputs (a power of two), whose products are added as by
// `tree_sum`: neighbours, then pairs of pairs.
template <class E, int M, int N>
void multiply_parts(typename E::acc (&acc)[M][N], const uint32_t* x, int64_t xs, const uint32_t* w,
                    int64_t words, int parts, Prefetch ahead) {
    vf sums[PART_LEVELS][M * N];  // of 1, 2, 4, .. parts that wait for their neighbours
    int64_t each = words / parts;
    for (int part = 0; part < parts; part++) {
        unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i / N][i % N] = vf{}; });
        multiply<E, M, N>(acc, x + part * each, xs, w + part * each * LANES, words * LANES, LANES,
                          int(each), {ahead.words, part + 1 < parts ? 0 : ahead.jump});
        int level = 0;
        for (; part >> level & 1; level++)
            unrolled<M * N>([&](auto i) SYLVAN_INLINE {
                acc[i / N][i % N] = sums[level][i] + acc[i / N][i % N];
            });
        unrolled<M * N>([&](auto i) SYLVAN_INLINE { sums[level][i] = acc[i / N][i % N]; });
    }
}

template <class E> void linear(const Linear& op, const Step& s, int t, void*) {
    Block b = linear_block(op, s, t);
    int64_t words = op.words, xs = op.x_bytes / 4;
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<E, Bf16>) {
        return by_amx<TilesBf16>(op, s, b, [&](Spot spot, int count, int cols, const float* raw) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < cols; j++)
                    write<bf16>(op, s, spot, i, j,
                                load<vf>(raw + (i / TILE * cols + j) * 256 + i % TILE * 16));
        });
    }
#endif
    by_registers(b, [&](Spot spot, auto M, auto N) {
        vf acc[M][N] = {};
        const uint32_t* x = at<uint32_t>(op.x, s) + b.x / 4 + spot.m * xs;
        const uint32_t* w = at<uint32_t>(op.weight, s) + spot.w * words * LANES;
        Prefetch ahead = b.prefetch(spot.m, N, words * LANES);
        if (op.parts == 1)
            multiply<E, M, N>(acc, x, xs, w, words * LANES, LANES, int(words), ahead);
        else
            multiply_parts<E, M, N>(acc, x, xs, w, words, op.parts, ahead);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write<typename E::row>(op, s, spot, i, j, acc[i][j]);
    });
}

}  // namespace

const Kernel linear_kernel[2] = {tiled<linear_tiles, linear<Bf16>>,
                                 tiled<linear_tiles, linear<F32>>};
