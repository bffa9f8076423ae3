// Products with codes of 4, 6 and 8 bits, which are decoded exactly to bfloat16 in registers.
// Layouts: codes [N / 16][words of K][16], scales and zero points [N / 16][K / group][16], or one
// scale per output; see `Scales`. The products of a group are summed, then scaled; groups are added
// in order. If a group has a shift, it is multiplied by the sum of the group's inputs. A pair of
// adjacent inputs is stored so that one bit shift puts both into the halves of a word: as nibbles i
// and i + 4, or bytes i and i + 2. Words of 6-bit codes: low nibbles, and high pairs of bits.
#include "codes.h"
#include "tiling.h"

namespace {

// The matrix of an op.
struct Matrix {
    const LinearCoded& op;
    const uint32_t* codes;
    Scales scales;
    const float* x_sums;
    int words, groups;  // per output; words of a group are words / groups

    static int groups_of(const LinearCoded& op) {
        return op.words * 32 / bits_of(op.code) / op.group;
    }
    Matrix(const LinearCoded& op, const Step& s)
        : op(op), codes(at<uint32_t>(op.weight, s)), scales(op, s, groups_of(op)),
          x_sums(at(op.x_sums, s)), words(op.words), groups(groups_of(op)) {}
    vf x_sum(int64_t row, int g) const { return splat(x_sums[row * groups + g]); }
    const uint32_t* group(int64_t block, int g) const {
        return codes + (block * words + int64_t(g) * (words / groups)) * LANES;
    }
};

// acc + a pair of weights times a pair of inputs, the second of one word (bf16) or two (float32).
template <class E> static inline SYLVAN_INLINE vf add_pair(vf acc, vu pair, const uint32_t* x) {
    if constexpr (E::ELEMENTS == 2)
        return E::dot(acc, pair, repeated(x));
    else
        return E::dot(E::dot(acc, pair << 16, repeated(x)), pair & 0xffff0000u, repeated(x + 1));
}

constexpr int MAX_ROWS = TILE_ROWS > 4 ? TILE_ROWS : 4;  // of one pass over the weights
// column blocks whose sums fit the registers
constexpr int wide_blocks(int rows) {
    return FEW_VECTORS < 16 ? 1 : std::min(FEW_VECTORS / rows / 2 * 2, 4);
}

// Calls f(first row, rows as a constant) for all rows, in passes of about as many each.
template <int MAX, class F> void by_passes(int count, F&& f) {
    for (int m = 0, left = ceil_div(count, MAX); left; left--) {
        int high = ceil_div(count - m, left);
        constant<MAX>(high, [&](auto M) { f(m, M); });
        m += high;
    }
}

// Calls f(spot, rows as a constant, blocks as a constant) for all rows of all blocks.
template <class F> void by_blocks(const Block& b, F&& f) {
    int wide = wide_blocks(ceil_div(b.count(), ceil_div(b.count(), MAX_ROWS)));
    for (int n = b.n0; n < b.n1;) {
        int cols = std::min(wide, b.n1 - n);
        by_passes<MAX_ROWS>(b.count(), [&](int m, auto M) {
            Spot spot{b.m0 + m, n, n + b.shift, b.out};
            constexpr int WIDE = wide_blocks(M);
            if (cols == WIDE)
                f(spot, M, std::integral_constant<int, WIDE>{});
            else
                f(spot, M, std::integral_constant < int, WIDE<2 ? 1 : 2>{});
        });
        n += cols;
    }
}

// Cache of the prefetched codes, in terms of `__builtin_prefetch`: L2 with few rows, when memory is
// the limit and the blocks have more streams than L1 has fill buffers; else L1.
constexpr int prefetch_locality(int rows) { return rows < 5 ? 2 : 3; }

// Few rows: each pass reads the weights from memory and decodes them in registers.
template <class E, class C> void few_rows(const Matrix& a, const Step& s, const Block& b) {
    constexpr int X = 2 / E::ELEMENTS;  // words of a pair of inputs
    int64_t xs = a.op.x_bytes / 4;
    int ahead = b.ahead(), units = a.words / a.groups / C::WORDS;
    const C code(a.op.code);
    by_blocks(b, [&](Spot spot, auto high, auto wide) {
        constexpr int M = high, N = wide;
        // The block after this one is being prefetched already, so prefetch the block N further on.
        // With few inputs, its first words are a large part of it and would otherwise stall. After
        // the last block of a tile, it is one of the tile that this thread probably takes next.
        const bool last = spot.n + N == b.n1 && !a.op.groups.present();
        const int64_t blocks = N - 1 + (last ? int64_t(s.threads - 1) * (b.n1 - b.n0) : 0),
                      end = int64_t(a.words) * LANES - ahead, jump = blocks * a.words * LANES;
        const int64_t across = a.scales.place(1, 0);  // from one block's scales to the next's
        vf total[M][N] = {}, step[N], shift_step[N];
        unrolled<N>([&](auto j) SYLVAN_INLINE { step[j] = shift_step[j] = vf{}; });
        const uint32_t *x = at<uint32_t>(a.op.x, s) + spot.m * xs, *w = a.group(spot.w, 0);
        for (int g = 0; g < a.groups; g++) {
            vf acc[M * N];
            vu zero[N];
            unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i] = vf{}; });
            unrolled<N>([&](auto j)
                            SYLVAN_INLINE { zero[j] = code.zero(a.scales, spot.w + j, g); });
            if (a.scales.starts(g))
                unrolled<N>([&](auto j) SYLVAN_INLINE {
                    step[j] = a.scales.step(spot.w + j, g, false);
                    if (a.scales.shifts) shift_step[j] = a.scales.step(spot.w + j, g, true);
                });
            for (int k = g * units; k < (g + 1) * units; k++) {
                int64_t first = int64_t(k) * C::WORDS, next = ahead;
                if (first * LANES >= end) next += jump;
                vu v[N][C::WORDS];
                unrolled<N * C::WORDS>([&](auto i) SYLVAN_INLINE {
                    constexpr int J = i / C::WORDS, AT = i % C::WORDS;
                    const uint32_t* p = w + (int64_t(J) * a.words + first + AT) * LANES;
                    v[J][AT] = load<vu>(p);
                    if (ahead) __builtin_prefetch(p + next, 0, prefetch_locality(M));
                });
                unrolled<C::PAIRS>([&](auto i) SYLVAN_INLINE {
                    vu pair[N];
                    unrolled<N>([&](auto j) SYLVAN_INLINE {
                        pair[j] = code.template pair<i>(v[j], zero[j]);
                    });
                    unrolled<M>([&](auto m) SYLVAN_INLINE {
                        const uint32_t* p = x + m * xs + (int64_t(k) * C::PAIRS + i) * X;
                        unrolled<N>([&](auto j) SYLVAN_INLINE {
                            acc[m * N + j] = add_pair<E>(acc[m * N + j], pair[j], p);
                        });
                    });
                });
            }
            int64_t place = a.scales.place(spot.w, g);
            unrolled<N>([&](auto j) SYLVAN_INLINE {
                vf scale = a.scales.scale(place + j * across, step[j]);
                unrolled<M>([&](auto m) SYLVAN_INLINE {
                    total[m][j] = fma(acc[m * N + j], scale, total[m][j]);
                });
                if (a.scales.shifts) {
                    vf shift = a.scales.shift(place + j * across, shift_step[j]);
                    unrolled<M>([&](auto m) SYLVAN_INLINE {
                        total[m][j] = fma(a.x_sum(spot.m + m, g), shift, total[m][j]);
                    });
                }
            });
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) write<typename E::row>(a.op, s, spot, i, j, total[i][j]);
    });
}

// One group of 16 outputs as words of dense weights.
template <class E, class C> void expand(uint32_t* to, const C& code, const uint32_t* from,
                                        int words, vu zero) {
    for (int k = 0; k < words; k += C::WORDS) {
        vu v[C::WORDS];
        unrolled<C::WORDS>([&](auto i) SYLVAN_INLINE { v[i] = load<vu>(from + (k + i) * LANES); });
        unrolled<C::PAIRS>([&](auto i) SYLVAN_INLINE {
            vu pair = code.template pair<i>(v, zero);
            if constexpr (E::ELEMENTS == 2) {
                store(to, pair);
                to += LANES;
            } else {
                store(to, pair << 16);
                store(to + LANES, pair & 0xffff0000u);
                to += 2 * LANES;
            }
        });
    }
}

// Expanded weights of two blocks and some groups, with what their products are multiplied by.
template <class E> struct Expanded {
    static constexpr int INPUTS = 128 * E::ELEMENTS, SIZE = INPUTS / E::ELEMENTS * LANES;
    static constexpr int GROUPS = INPUTS / LANES;
    vf scale[2][GROUPS], shift[2][GROUPS];
    alignas(64) uint32_t weights[2 * SIZE];
    int count, words;  // groups; 32-bit words of a row of x in one of them

    template <class C> void fill(const Matrix& a, const C& code, int64_t block, int first) {
        int coded = a.words / a.groups;
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < count; i++) {
                int64_t n = block + j, g = first + i;
                uint32_t* to = weights + j * SIZE + i * words * LANES;
                expand<E>(to, code, a.group(n, g), coded, code.zero(a.scales, n, g));
                scale[j][i] = a.scales.scale(n, g);
                if (a.scales.shifts) shift[j][i] = a.scales.shift(n, g);
            }
    }
};

// Adds the products of M rows and TILE_COLS blocks from block j on to their sums.
template <class E, int M>
void add_groups(const Matrix& a, const Expanded<E>& part, const uint32_t* x, int64_t row, int first,
                int j, float (*sums)[2 * LANES]) {
    constexpr int N = TILE_COLS, SIZE = Expanded<E>::SIZE;
    int64_t xs = a.op.x_bytes / 4;
    vf total[M * N];
    unrolled<M * N>([&](auto i)
                        SYLVAN_INLINE { total[i] = load<vf>(sums[i / N] + (j + i % N) * LANES); });
    for (int g = 0; g < part.count; g++) {
        vf acc[M][N] = {};
        const uint32_t* w = part.weights + j * SIZE + g * part.words * LANES;
        multiply<E, M, N>(acc, x + g * part.words, xs, w, SIZE, LANES, part.words);
        unrolled<M * N>([&](auto i) SYLVAN_INLINE {
            total[i] = fma(acc[i / N][i % N], part.scale[j + i % N][g], total[i]);
        });
        if (a.scales.shifts)
            unrolled<M * N>([&](auto i) SYLVAN_INLINE {
                vf sum = a.x_sum(row + i / N, first + g);
                total[i] = fma(sum, part.shift[j + i % N][g], total[i]);
            });
    }
    unrolled<M * N>([&](auto i)
                        SYLVAN_INLINE { store(sums[i / N] + (j + i % N) * LANES, total[i]); });
}

// Rows whose sums of one group and of all groups fit the registers together.
constexpr int MANY_ROWS = TILE_ROWS > 4 ? 6 : TILE_ROWS;

// More rows: two blocks are decoded once for all rows of the tile, as many groups at a time as fit
// the L1 cache. The order of operations is that of `few_rows`.
template <class E, class C> void many_rows(const Matrix& a, const Step& s, const Block& b) {
    alignas(64) static thread_local float sums[LINEAR_ROWS][2 * LANES];
    static thread_local Expanded<E> part;
    int64_t xs = a.op.x_bytes / 4;
    part.words = a.words / a.groups / C::WORDS * C::PAIRS * 2 / E::ELEMENTS;
    const C code(a.op.code);
    int most = Expanded<E>::SIZE / LANES / part.words;
    for (int n = b.n0; n < b.n1; n += 2) {
        memset(sums, 0, sizeof(sums[0]) * b.count());
        for (int g = 0; g < a.groups; g += most) {
            part.count = std::min(most, a.groups - g);
            part.fill(a, code, n + b.shift, g);
            const uint32_t* x = at<uint32_t>(a.op.x, s) + b.m0 * xs + int64_t(g) * part.words;
            by_passes<MANY_ROWS>(b.count(), [&](int m, auto M) {
                for (int j = 0; j < 2; j += TILE_COLS)
                    add_groups<E, M>(a, part, x + m * xs, b.m0 + m, g, j, sums + m);
            });
        }
        Spot spot{b.m0, n, n + b.shift, b.out};
        for (int i = 0; i < b.count(); i++)
            for (int j = 0; j < 2; j++)
                write<typename E::row>(a.op, s, spot, i, j, load<vf>(sums[i] + j * LANES));
    }
}

template <class E> void linear_coded(const LinearCoded& op, const Step& s, int t, void*) {
    Block b = linear_block(op, s, t);
    Matrix a(op, s);
    with_code(op.code, op.zeros.present(), [&](auto kind) {
        using C = typename decltype(kind)::type;
        if (b.count() <= MAX_ROWS * C::PASSES)
            few_rows<E, C>(a, s, b);
        else
            many_rows<E, C>(a, s, b);
    });
}

template <class T> void group_sums(const GroupSums& op, const Step& s, int64_t r) {
    const T* x = at<T>(op.x, s) + r * stride(op.cols);
    int groups = int(stride(op.cols)) / op.group;
    for (int g = 0; g < groups; g++) {
        vf total{};
        for (int i = 0; i < op.group; i += LANES) total += get(x + g * op.group + i);
        at(op.out, s)[r * groups + g] = sum(total);
    }
}

void take_columns(const TakeColumns& op, const Step& s, int64_t r) {
    int size = op.dtype == F32_ROWS ? 4 : 2;
    const char* x = at<char>(op.x, s) + r * op.x_stride * size;
    char* out = at<char>(op.out, s) + r * stride(op.cols) * size;
    const int32_t* order = at(op.order, s);
    for (int i = 0; i < op.cols; i++) memcpy(out + i * size, x + order[i] * size, size);
    memset(out + op.cols * size, 0, (stride(op.cols) - op.cols) * size);
}

}  // namespace

const Kernel linear_coded_kernel[2] = {tiled<linear_tiles, linear_coded<Bf16>>,
                                       tiled<linear_tiles, linear_coded<F32>>};
const Kernel group_sums_kernel[2] = {per_row<group_sums<bf16>>, per_row<group_sums<float>>};
const Kernel take_columns_kernel[2] = {per_row<take_columns>, per_row<take_columns>};
