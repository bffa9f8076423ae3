// Sparse latent attention (DeepSeek V3.2): stores rows, scores tokens, selects the best, attends.
//
// Selected tokens are scattered, so cache rows are multiplied as they are stored: lanes are heads
// for scores, and columns for values. Chunks of SPARSE_CHUNK selected tokens are merged in order.
#include "../paged/rope.h"
#include <cmath>

namespace {

constexpr int SPARSE_HEADS = 2 * LANES, SPARSE_CHUNK = 128, SCORE_CHUNK = 512;
// rows that share loads of two vectors
constexpr int FACTORS = std::max(1, TILE_ROWS* TILE_COLS / 2);
// exp(x) is 2 to so many x; score before the first token
constexpr float POWERS_OF_TWO = 1.44269504f, UNSEEN = -1e30f;

// A row of the step: its request, and the tokens up to its own.
struct Reader {
    int seen;
    const int32_t* table;

    Reader(const TokenPages& pages, const Step& s, int64_t r) {
        const int32_t* starts = s.run->row_start;
        int64_t seq = std::upper_bound(starts, starts + s.run->seqs + 1, int32_t(r)) - starts - 1;
        seen = s.run->kv_len[seq] - (starts[seq + 1] - int(r)) + 1;
        table = s.run->page_table + pages.table * s.run->table_step +
                int64_t(s.run->table_row[seq]) * s.run->table_stride;
    }
};

int64_t latent_width(const TokenPages& pages) { return round_up(pages.cols, KEY_PAD); }
int64_t key_width(const TokenPages& pages) { return round_up(pages.key_cols, VALUE_PAD); }

template <class E> void token_store(const TokenStore& op, const Step& s, int64_t r) {
    typedef typename E::row T;
    const TokenPages& pages = op.pages;
    int slot = s.run->slots[int64_t(pages.table) * s.run->slot_step + r];
    int page = slot / pages.page_size, off = slot % pages.page_size;
    const T* row = at<T>(op.qkv, s) + r * stride((op.num_heads + 1) * pages.cols + op.value_dim);
    T* latent =
        at<T>(pages.latents, s) + int64_t(page) * pages.latent_step + off * latent_width(pages);
    memcpy(latent, row + int64_t(op.num_heads) * pages.cols, pages.cols * sizeof(T));
    for (int64_t d = pages.cols; d < latent_width(pages); d++) latent[d] = 0;
    if (!op.q.present()) return;
    const float* table = at(op.cos_sin, s) + int64_t(s.run->positions[r]) * op.rotary_dim;
    Rope rope{table, table + op.rotary_dim / 2, op.rotary_dim, op.interleaved != 0};
    Norm none{nullptr, 0, 0};
    T head[MAX_HEAD + KEY_PAD], *q = at<T>(op.q, s) + r * stride(op.index_heads * pages.key_cols);
    for (int h = 0; h < op.index_heads; h++, q += pages.key_cols) {
        prepare(q, head, pages.key_cols, none, rope);
        memcpy(q, head, pages.key_cols * sizeof(T));
    }
    prepare(at<T>(op.k, s) + r * stride(pages.key_cols), head, pages.key_cols, none, rope);
    T* key = at<T>(pages.keys, s) + int64_t(page) * pages.key_step +
             off / LANES * LANES * key_width(pages);
    for (int d = 0; d < pages.key_cols; d += E::ELEMENTS)
        memcpy(key + d * LANES + off % LANES * E::ELEMENTS, head + d, 4);
}

// Scores of tokens begin .. end to `out`, which holds whole blocks of 32: heads are added in order.
template <class E> void score_tokens(const IndexScores& op, const Step& s, int64_t r,
                                     const Reader& reader, int begin, int end, float* out) {
    typedef typename E::row T;
    const TokenPages& pages = op.pages;
    int heads = op.index_heads, cols = pages.key_cols, words = cols / E::ELEMENTS;
    const T* q = at<T>(op.q, s) + r * stride(heads * cols);
    const float* weights = at(op.weights, s) + r * stride(heads);
    auto block = [&](int t) {
        const T* page =
            at<T>(pages.keys, s) + int64_t(reader.table[t / pages.page_size]) * pages.key_step;
        return reinterpret_cast<const uint32_t*>(page + t % pages.page_size / LANES * LANES *
                                                            key_width(pages));
    };
    // a missing second block repeats the first
    for (int t = begin; t < end; t += 2 * LANES, out += 2 * LANES) {
        const uint32_t *k0 = block(t), *k1 = t + LANES < end ? block(t + LANES) : k0;
        vf total[2] = {};
        for (int m = 0; m < heads; m += FACTORS)
            constant<FACTORS>(std::min(FACTORS, heads - m), [&](auto M) {
                vf acc[M][2] = {};
                multiply<E, M, 2>(acc, reinterpret_cast<const uint32_t*>(q + m * cols), words, k0,
                                  k1 - k0, LANES, words);
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < 2; j++)
                        total[j] = fma(max(acc[i][j], vf{}), splat(weights[m + i]), total[j]);
            });
        store(out, total[0]);
        store(out + LANES, total[1]);
    }
}

int longest(const Step& s) {
    int most = 0;
    for (int i = 0; i < s.run->seqs; i++)
        if (s.run->row_start[i + 1] > s.run->row_start[i]) most = std::max(most, s.run->kv_len[i]);
    return most;
}
int64_t score_stride(const Step& s) { return round_up(longest(s), 2 * LANES); }
bool fits(const IndexScores& op, const Step& s) {
    return rows(op, s) * score_stride(s) * 4 < int64_t(op.scores_mib) << 20;
}

int index_scores_tiles(const IndexScores& op, const Step& s) {
    int most = longest(s);
    return most > op.top_k && fits(op, s) ? rows(op, s) * ceil_div(most, SCORE_CHUNK) : 0;
}
template <class E> void index_scores(const IndexScores& op, const Step& s, int t, void*) {
    int chunks = ceil_div(longest(s), SCORE_CHUNK), r = t / chunks;
    int begin = t % chunks * SCORE_CHUNK;
    Reader reader(op.pages, s, r);
    if (reader.seen <= op.top_k || begin >= reader.seen) return;
    int end = std::min(begin + SCORE_CHUNK, reader.seen);
    score_tokens<E>(op, s, r, reader, begin, end, at(op.scores, s) + r * score_stride(s) + begin);
}

uint32_t ordered(float x) {  // the same order as the numbers'
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

int index_choice_tiles(const IndexChoice& op, const Step& s) { return rows(op, s); }
template <class E> void index_choice(const IndexChoice& op, const Step& s, int r, void* scratch) {
    Reader reader(op.pages, s, r);
    int32_t* out = at(op.chosen, s) + r * stride(op.top_k);
    if (reader.seen <= op.top_k) {
        for (int t = 0; t < reader.seen; t++) out[t] = t;
        return;
    }
    float* score = static_cast<float*>(scratch);
    if (fits(op, s))
        score = at(op.scores, s) + r * score_stride(s);
    else
        score_tokens<E>(op, s, r, reader, 0, reader.seen, score);
    uint32_t best = 0, known = 0;  // the bits of the last score that is chosen, from the highest on
    int left = op.top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {}, digit = 255;
        for (int t = 0; t < reader.seen; t++)
            if (uint32_t u = ordered(score[t]); (u & known) == best) count[u >> shift & 255]++;
        for (; count[digit] < left; digit--) left -= count[digit];
        best |= uint32_t(digit) << shift;
        known |= 255u << shift;
    }
    for (int t = 0; t < reader.seen; t++) {
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
vu joined(const float* const* row, int d) { return load<vu>(row[0] + d); }
vu joined(const bf16* const* row, int d) {
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

template <class E> struct SparseWorkspace {  // scratch memory of a thread
    typedef typename E::row T;
    T q[MAX_HEAD * SPARSE_HEADS];  // [16 heads][word][16]
    float score[SPARSE_CHUNK][SPARSE_HEADS];
    T weight[SPARSE_HEADS][SPARSE_CHUNK];
    float all[SPARSE_HEADS][MAX_HEAD];
};
static_assert(sizeof(SparseWorkspace<F32>) <= SCRATCH_BYTES);

// Some heads of a row over its tokens, a chunk at a time.
template <class E> struct SparseTile {
    typedef typename E::row T;
    const SparseAttention& op;
    SparseWorkspace<E>& ws;
    int first, heads, blocks, words, v_pad;
    vf top[2], total[2], fade[2];
    const T* row[SPARSE_CHUNK + FACTORS];

    SparseTile(const SparseAttention& op, SparseWorkspace<E>& ws, int first)
        : op(op), ws(ws), first(first), heads(std::min(SPARSE_HEADS, op.num_heads - first)),
          blocks(ceil_div(heads, LANES)), words(op.pages.cols / E::ELEMENTS),
          v_pad(round_up(op.value_dim, VALUE_PAD)) {
        for (int b = 0; b < blocks; b++) {
            top[b] = splat(UNSEEN);
            total[b] = vf{};
        }
    }
    void gather(const T* q) {
        constexpr int e = E::ELEMENTS;
        memset(ws.q, 0, int64_t(blocks) * words * LANES * 4);
        for (int h = 0; h < heads; h++)
            for (int w = 0; w < words; w++)
                memcpy(ws.q + ((h / LANES * words + w) * LANES + h % LANES) * e,
                       q + int64_t(first + h) * op.pages.cols + w * e, 4);
        for (int h = 0; h < heads; h++) memset(ws.all[h], 0, v_pad * sizeof(float));
    }
    // `count` tokens, whose rows are known; those behind them repeat the last one.
    void attend(int count) {
        constant<2>(blocks, [&](auto N) { scores<N>(count); });
        float unit = op.scale * POWERS_OF_TWO;
        for (int b = 0; b < blocks; b++) softmax_weights(count, b, unit);
        for (int i = count; i % E::ELEMENTS; i++)
            for (int h = 0; h < heads; h++) ws.weight[h][i] = 0;
        values(ceil_div(count, E::ELEMENTS));
    }
    template <int N> void scores(int count) {
        auto* q = reinterpret_cast<const uint32_t*>(ws.q);
        for (int i = 0; i < count; i += FACTORS) {
            const uint32_t* x[FACTORS];
            for (int j = 0; j < FACTORS; j++) x[j] = reinterpret_cast<const uint32_t*>(row[i + j]);
            fetch(i + FACTORS, count);
            vf acc[FACTORS][N] = {};
            multiply_rows<E, FACTORS, N>(acc, x, q, int64_t(words) * LANES, words);
            for (int j = 0; j < std::min(FACTORS, count - i); j++)
                for (int b = 0; b < N; b++) store(ws.score[i + j] + b * LANES, acc[j][b]);
        }
    }
    void fetch(int i, int count) const {
        for (int end = std::min(i + FACTORS, count); i < end; i++)
            for (int64_t d = 0; d < op.pages.cols * int64_t(sizeof(T)); d += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(row[i]) + d);
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
    void write(T* out) const {
        for (int h = 0; h < heads; h++) {
            float scale = 1.f / total[h / LANES][h % LANES];
            for (int d = 0; d < v_pad; d += LANES) {
                T v[LANES];
                put(v, load<vf>(ws.all[h] + d) * scale);
                memcpy(out + int64_t(first + h) * op.value_dim + d, v,
                       std::min(LANES, op.value_dim - d) * sizeof(T));
            }
        }
    }
};

int head_tiles(const SparseAttention& op) { return ceil_div(op.num_heads, SPARSE_HEADS); }
int sparse_attention_tiles(const SparseAttention& op, const Step& s) {
    return rows(op, s) * head_tiles(op);
}
template <class E> void sparse_attention(const SparseAttention& op, const Step& s, int t,
                                         void* scratch) {
    typedef typename E::row T;
    const TokenPages& pages = op.pages;
    int64_t r = t / head_tiles(op);
    Reader reader(pages, s, r);
    SparseTile<E> tile(op, *static_cast<SparseWorkspace<E>*>(scratch),
                       t % head_tiles(op) * SPARSE_HEADS);
    tile.gather(at<T>(op.qkv, s) + r * stride((op.num_heads + 1) * pages.cols + op.value_dim));
    const int32_t* chosen = at(op.chosen, s) + r * stride(op.top_k);
    for (int start = 0, count = std::min(reader.seen, op.top_k); start < count;
         start += SPARSE_CHUNK) {
        int mine = std::min(SPARSE_CHUNK, count - start);
        for (int i = 0; i < mine + FACTORS; i++) {
            int token = chosen[start + std::min(i, mine - 1)];
            tile.row[i] = at<T>(pages.latents, s) +
                          int64_t(reader.table[token / pages.page_size]) * pages.latent_step +
                          token % pages.page_size * latent_width(pages);
        }
        tile.attend(mine);
    }
    int64_t width = int64_t(op.num_heads) * op.value_dim;
    T* out = at<T>(op.out, s) + r * stride(int(width));
    tile.write(out);
    if (tile.first == 0)
        for (int64_t d = width; d < stride(int(width)); d++) out[d] = 0;
}

}  // namespace

const Kernel token_store_kernel[2] = {per_row<token_store<Bf16>>, per_row<token_store<F32>>};
const Kernel index_scores_kernel[2] = {tiled<index_scores_tiles, index_scores<Bf16>>,
                                       tiled<index_scores_tiles, index_scores<F32>>};
const Kernel index_choice_kernel[2] = {tiled<index_choice_tiles, index_choice<Bf16>>,
                                       tiled<index_choice_tiles, index_choice<F32>>};
const Kernel sparse_attention_kernel[2] = {tiled<sparse_attention_tiles, sparse_attention<Bf16>>,
                                           tiled<sparse_attention_tiles, sparse_attention<F32>>};
