// Dense weights, packed [N / 16][words of K][16], a word being two bf16 or one float32.
#include "tiling.h"

namespace {

#if defined(__AMX_BF16__)
constexpr int BY_VECTORS = 2;  // rows

// So few rows as the matrix tiles multiply them, bit for bit, but by vectors, which wait less for memory. Of 32 inputs the
// even and the odd ones are summed apart, from zero, and then added to the total; denormal numbers count as zero.
// `x`: room for the rows' numbers as float32.
void few_rows(const Op& op, const Step& s, const Block& b, uint32_t* x) {
    int64_t words = op.n[0];
    for (int i = 0; i < b.count(); i++) {
        auto* row = reinterpret_cast<const uint32_t*>(at<char>(op, s, X) + b.x + (b.m0 + i) * int64_t(op.n[4]));
        for (int64_t k = 0; k < words; k++) x[(i * words + k) * 2] = row[k] << 16, x[(i * words + k) * 2 + 1] = row[k] & 0xffff0000u;
    }
    const uint32_t usual = _mm_getcsr(), no_denormals = usual | 0x8040;
    by_registers(b, [&](Spot spot, auto M, auto N) {
        if constexpr (M <= BY_VECTORS) {
            const uint32_t* w = at<uint32_t>(op, s, WEIGHT) + spot.w * words * LANES;
            vf total[M][N] = {};
            asm volatile("ldmxcsr %0" ::"m"(no_denormals) : "memory");
            for (int64_t tile = 0; tile < words; tile += TILE_WORDS) {
                vf even[M][N] = {}, odd[M][N] = {};
                for (int64_t k = tile; k < tile + TILE_WORDS; k++) {
                    vf low[N], high[N];
                    for (int j = 0; j < N; j++) {
                        const uint32_t* p = w + (j * words + k) * LANES;
                        vu v = load<vu>(p);
                        __builtin_prefetch(p + b.ahead());
                        low[j] = (vf)(v << 16), high[j] = (vf)(v & 0xffff0000u);
                    }
                    for (int i = 0; i < M; i++)
                        for (int j = 0; j < N; j++) {
                            const uint32_t* pair = x + (i * words + k) * 2;
                            even[i][j] = fma(low[j], (vf)(vu{} + pair[0]), even[i][j]);
                            odd[i][j] = fma(high[j], (vf)(vu{} + pair[1]), odd[i][j]);
                        }
                }
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < N; j++) total[i][j] += even[i][j] + odd[i][j];
            }
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) asm volatile("" : "+v"(total[i][j]));  // computed before the mode changes
            asm volatile("ldmxcsr %0" ::"m"(usual) : "memory");
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) write<bf16>(op, s, spot, i, j, total[i][j]);
        }
    });
}
#endif

template <class E> void linear(const Op& op, const Step& s, int t, [[maybe_unused]] void* scratch) {
    Block b = linear_block(op, s, t);
    int64_t words = op.n[0], xs = op.n[4] / 4;
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<E, Bf16>) {
        if (b.count() <= BY_VECTORS && b.count() * words * 8 <= SCRATCH_BYTES)
            return few_rows(op, s, b, static_cast<uint32_t*>(scratch));
        return by_amx<TilesBf16>(op, s, b, [&](Spot spot, int count, int cols, const float* raw) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < cols; j++)
                    write<bf16>(op, s, spot, i, j, load<vf>(raw + (i / TILE * cols + j) * 256 + i % TILE * 16));
        });
    }
#endif
    by_registers(b, [&](Spot spot, auto M, auto N) {
        vf acc[M][N] = {};
        const uint32_t *x = at<uint32_t>(op, s, X) + b.x / 4 + spot.m * xs, *w = at<uint32_t>(op, s, WEIGHT) + spot.w * words * LANES;
        multiply<E, M, N>(acc, x, xs, w, words * LANES, LANES, int(words), b.ahead());
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write<typename E::row>(op, s, spot, i, j, acc[i][j]);
    });
}

}  // namespace

const Kernel linear_kernel[2] = {{linear_tiles, linear<Bf16>}, {linear_tiles, linear<F32>}};
