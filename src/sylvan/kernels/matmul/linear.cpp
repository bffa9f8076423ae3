// Dense weights, packed [N / 16][words of K][16], a word being two bf16 or one float32.
#include "tiling.h"

namespace {

template <class E> void linear(const Op& op, const Step& s, int t, void*) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<E, Bf16>) {
        by_amx<TilesBf16>(op, s, t, [&](int m, int count, int n, int cols, const float* raw) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < cols; j++)
                    write<bf16>(op, s, m + i, (n + j) * LANES, load<vf>(raw + (i / TILE * cols + j) * 256 + i % TILE * 16));
        });
        return;
    }
#endif
    int64_t words = op.n[0], xs = op.n[4] / 4;
    int ahead = rows(op, s) <= 4 ? 384 : 0;  // words; hides the memory's latency where the weights are read once
    by_registers(op, s, t, [&](int64_t m, auto M, int64_t n, auto N) {
        vf acc[M][N] = {};
        const uint32_t *x = at<uint32_t>(op, s, X) + m * xs, *w = at<uint32_t>(op, s, WEIGHT) + n * words * LANES;
        multiply<E, M, N>(acc, x, xs, w, words * LANES, LANES, int(words), ahead);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write<typename E::row>(op, s, m + i, int(n + j) * LANES, acc[i][j]);
    });
}

}  // namespace

const Kernel linear_kernel[2] = {{linear_tiles, linear<Bf16>}, {linear_tiles, linear<F32>}};
