// Attention of one row's heads to rows of the cache that lie anywhere in memory. They are
// multiplied as they lie: lanes are heads for scores, and columns for values. Chunks of
// SPARSE_CHUNK rows are merged in order.
#pragma once
#include "../paged/rope.h"
#include <cmath>

namespace sparse {

constexpr int SPARSE_HEADS = 2 * LANES, SPARSE_CHUNK = 128, SCORE_CHUNK = 512;
// rows that share loads of two vectors
constexpr int FACTORS = std::max(1, TILE_ROWS* TILE_COLS / 2);
// exp(x) is 2 to so many x; score before the first token
constexpr float POWERS_OF_TWO = 1.44269504f, UNSEEN = -1e30f;

// A row of the step: its request, and the tokens up to its own.
struct Reader {
    int seq, seen;

    Reader(const Step& s, int64_t r) {
        const int32_t* starts = s.run->row_start;
        seq = int(std::upper_bound(starts, starts + s.run->seqs + 1, int32_t(r)) - starts) - 1;
        seen = s.run->kv_len[seq] - (starts[seq + 1] - int(r)) + 1;
    }
    const int32_t* table(const Step& s, int group) const {
        return s.run->page_table + group * s.run->table_step +
               int64_t(s.run->table_row[seq]) * s.run->table_stride;
    }
};

// Tokens of the longest request that has rows in the step.
static inline int longest(const Step& s) {
    int most = 0;
    for (int i = 0; i < s.run->seqs; i++)
        if (s.run->row_start[i + 1] > s.run->row_start[i]) most = std::max(most, s.run->kv_len[i]);
    return most;
}

static inline uint32_t ordered(float x) {  // the same order as the numbers'
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes the numbers of the `top_k` best of `count` scores, in order; of equal scores the first.
static inline void choose(const float* score, int count, int top_k, int32_t* out) {
    uint32_t best = 0, known = 0;  // the bits of the last score that is chosen, from the highest on
    int left = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int found[256] = {}, digit = 255;
        for (int t = 0; t < count; t++)
            if (uint32_t u = ordered(score[t]); (u & known) == best) found[u >> shift & 255]++;
        for (; found[digit] < left; digit--) left -= found[digit];
        best |= uint32_t(digit) << shift;
        known |= 255u << shift;
    }
    for (int t = 0; t < count; t++) {
        uint32_t u = ordered(score[t]);
        if (u > best || (u == best && left-- > 0)) *out++ = t;
    }
}

// acc[m][n] += x[m] . w[n], where the x are anywhere.
template <class E, int M, int N>
static inline SYLVAN_INLINE void multiply_rows(vf (&acc)[M][N], const uint32_t* const (&x)[M],
                                               const uint32_t* w, int64_t ws, int words) {
    vf sums[M * N];
    unrolled<M * N>([&](auto i) SYLVAN_INLINE { sums[i] = acc[i / N][i % N]; });
    for (int k = 0; k < words; k++) {
        vu wv[N];
        unrolled<N>([&](auto n) SYLVAN_INLINE { wv[n] = load<vu>(w + n * ws + k * LANES); });
        unrolled<M>([&](auto m) SYLVAN_INLINE {
            vu xv = repeated(x[m] + k);
            unrolled<N>([&](auto n) SYLVAN_INLINE {
                sums[m * N + n] = E::dot(sums[m * N + n], wv[n], xv);
            });
        });
    }
    unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i / N][i % N] = sums[i]; });
}

// Words of a column and the following ones, of as many rows as a word has elements.
static inline vu joined(const float* const* row, int d) { return load<vu>(row[0] + d); }
static inline vu joined(const bf16* const* row, int d) {
    return widened<bf16, vu>(row[0] + d) | widened<bf16, vu>(row[1] + d) << 16;
}

// acc[m][n] += weights of a head . columns of the rows
template <class E, int M, int N>
static inline SYLVAN_INLINE void weigh_rows(vf (&acc)[M][N], const uint32_t* x, int64_t xs,
                                            const typename E::row* const* row, int d, int words) {
    vf sums[M * N] = {};
    for (int k = 0; k < words; k++) {
        vu wv[N];
        unrolled<N>([&](auto n)
                        SYLVAN_INLINE { wv[n] = joined(row + k * E::ELEMENTS, d + n * LANES); });
        unrolled<M>([&](auto m) SYLVAN_INLINE {
            vu xv = repeated(x + m * xs + k);
            unrolled<N>([&](auto n) SYLVAN_INLINE {
                sums[m * N + n] = E::dot(sums[m * N + n], wv[n], xv);
            });
        });
    }
    unrolled<M * N>([&](auto i) SYLVAN_INLINE { acc[i / N][i % N] = sums[i]; });
}

// Sixteen heads at a time, word by word: [16 heads][word][16]. Missing heads are zeros.
template <class E> static inline void gather_heads(typename E::row* to, const typename E::row* q,
                                                   int cols, int heads) {
    constexpr int e = E::ELEMENTS;
    int words = cols / e;
    memset(to, 0, int64_t(ceil_div(heads, LANES)) * words * LANES * 4);
    for (int h = 0; h < heads; h++)
        for (int w = 0; w < words; w++)
            memcpy(to + ((h / LANES * words + w) * LANES + h % LANES) * e,
                   q + int64_t(h) * cols + w * e, 4);
}

// Scores of gathered heads for `count` rows; FACTORS more must be readable.
template <class E, int N>
static inline void score_rows(const typename E::row* heads, int cols,
                              const typename E::row* const* row, int count,
                              float (*score)[SPARSE_HEADS]) {
    auto* q = reinterpret_cast<const uint32_t*>(heads);
    int words = cols / E::ELEMENTS;
    for (int i = 0; i < count; i += FACTORS) {
        const uint32_t* x[FACTORS];
        for (int j = 0; j < FACTORS; j++) x[j] = reinterpret_cast<const uint32_t*>(row[i + j]);
        for (int j = i + FACTORS; j < std::min(i + 2 * FACTORS, count); j++)
            for (int64_t d = 0; d < cols * int64_t(sizeof(*heads)); d += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(row[j]) + d);
        vf acc[FACTORS][N] = {};
        multiply_rows<E, FACTORS, N>(acc, x, q, int64_t(words) * LANES, words);
        for (int j = 0; j < std::min(FACTORS, count - i); j++)
            for (int b = 0; b < N; b++) store(score[i + j] + b * LANES, acc[j][b]);
    }
}

struct HeadShape {  // heads of queries, and the first columns of a row that are its value
    int num_heads, cols, value_dim;
    float scale;

    int tiles() const { return ceil_div(num_heads, SPARSE_HEADS); }
};

template <class E> struct SparseWorkspace {  // scratch memory of a thread
    typedef typename E::row T;
    T q[MAX_HEAD * SPARSE_HEADS];
    float score[SPARSE_CHUNK][SPARSE_HEADS];
    T weight[SPARSE_HEADS][SPARSE_CHUNK];
    float all[SPARSE_HEADS][MAX_HEAD];
};
static_assert(sizeof(SparseWorkspace<F32>) <= SCRATCH_BYTES);

// Some heads of a row over its tokens, a chunk at a time.
template <class E> struct SparseTile {
    typedef typename E::row T;
    HeadShape shape;
    SparseWorkspace<E>& ws;
    int first, heads, blocks, v_pad;
    vf top[2], total[2], fade[2];
    const T* row[SPARSE_CHUNK + FACTORS];

    SparseTile(HeadShape shape, SparseWorkspace<E>& ws, int number)
        : shape(shape), ws(ws), first(number * SPARSE_HEADS),
          heads(std::min(SPARSE_HEADS, shape.num_heads - first)), blocks(ceil_div(heads, LANES)),
          v_pad(round_up(shape.value_dim, VALUE_PAD)) {
        for (int b = 0; b < blocks; b++) {
            top[b] = splat(UNSEEN);
            total[b] = vf{};
        }
    }
    // `q`: all heads of the row
    void gather(const T* q) {
        gather_heads<E>(ws.q, q + int64_t(first) * shape.cols, shape.cols, heads);
        for (int h = 0; h < heads; h++) memset(ws.all[h], 0, v_pad * sizeof(float));
    }
    // `count` tokens, whose rows are known; those behind them repeat the last one.
    void attend(int count) {
        constant<2>(blocks,
                    [&](auto N) { score_rows<E, N>(ws.q, shape.cols, row, count, ws.score); });
        float unit = shape.scale * POWERS_OF_TWO;
        for (int b = 0; b < blocks; b++) softmax_weights(count, b, unit);
        for (int i = count; i % E::ELEMENTS; i++)
            for (int h = 0; h < heads; h++) ws.weight[h][i] = 0;
        values(ceil_div(count, E::ELEMENTS));
    }
    // Lanes are heads: computes their weights, and the factor that rescales earlier chunks.
    void softmax_weights(int count, int b, float unit) {
        vf most = top[b], power = splat(unit), sum{};
        for (int i = 0; i < count; i++) most = max(most, load<vf>(ws.score[i] + b * LANES));
        fade[b] = exp2((top[b] - most) * power);
        int mine = std::min(LANES, heads - b * LANES);
        for (int i = 0; i < count; i++) {
            vf p = exp2((load<vf>(ws.score[i] + b * LANES) - most) * power);
            T weight[LANES];
            put(weight, p);
            for (int h = 0; h < mine; h++) ws.weight[b * LANES + h][i] = weight[h];
            sum += p;
        }
        top[b] = most;
        total[b] = total[b] * fade[b] + sum;
    }
    void values(int pairs) {
        int d = 0;
        for (; d + 2 * LANES <= v_pad; d += 2 * LANES) columns<2>(d, pairs);
        if (d < v_pad) columns<1>(d, pairs);
    }
    template <int N> void columns(int d, int pairs) {
        for (int m = 0; m < heads; m += FACTORS)
            constant<FACTORS>(std::min(FACTORS, heads - m), [&](auto M) {
                vf acc[M][N];
                weigh_rows<E, M, N>(acc, reinterpret_cast<const uint32_t*>(ws.weight[m]),
                                    SPARSE_CHUNK / E::ELEMENTS, row, d, pairs);
                for (int i = 0; i < M; i++) {
                    int h = m + i;
                    for (int n = 0; n < N; n++) {
                        float* to = ws.all[h] + d + n * LANES;
                        store(to, load<vf>(to) * fade[h / LANES][h % LANES] + acc[i][n]);
                    }
                }
            });
    }
    // Reciprocal of the sum of weights of a head; a sink takes part in it and has no value.
    float share(int h, const float* sinks) const {
        float sum = total[h / LANES][h % LANES];
        if (!sinks) return 1.f / sum;
        float seen = top[h / LANES][h % LANES] * (shape.scale * POWERS_OF_TWO);
        float sink = sinks[first + h] * POWERS_OF_TWO, most = std::max(seen, sink);
        vf e = exp2(two(seen - most, sink - most));
        return e[0] / (sum * e[0] + e[1]);
    }
    // Calls f(values of a head in float32), which may change them, and writes them.
    template <class F> void write(T* out, const float* sinks, F&& f) const {
        alignas(64) float found[MAX_HEAD + LANES];
        for (int h = 0; h < heads; h++) {
            float scale = share(h, sinks);
            for (int d = 0; d < v_pad; d += LANES)
                store(found + d, load<vf>(ws.all[h] + d) * scale);
            f(found);
            T* to = out + int64_t(first + h) * shape.value_dim;
            for (int d = 0; d < v_pad; d += LANES) {
                T v[LANES];
                put(v, load<vf>(found + d));
                memcpy(to + d, v, std::min(LANES, shape.value_dim - d) * sizeof(T));
            }
        }
        int64_t width = int64_t(shape.num_heads) * shape.value_dim;
        if (first == 0)
            for (int64_t d = width; d < stride(int(width)); d++) out[d] = 0;
    }
};

}  // namespace sparse
