// Sparse latent attention (DeepSeek V3.2): stores rows, scores tokens, selects the best, attends.
//
// Chosen tokens are scattered, so cache rows are multiplied as they lie in memory: see tile.h.
#include "tile.h"

namespace {

using namespace sparse;

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
                                     const int32_t* table, int begin, int end, float* out) {
    typedef typename E::row T;
    const TokenPages& pages = op.pages;
    int heads = op.index_heads, cols = pages.key_cols, words = cols / E::ELEMENTS;
    const T* q = at<T>(op.q, s) + r * stride(heads * cols);
    const float* weights = at(op.weights, s) + r * stride(heads);
    auto block = [&](int t) {
        const T* page = at<T>(pages.keys, s) + int64_t(table[t / pages.page_size]) * pages.key_step;
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
    Reader reader(s, r);
    if (reader.seen <= op.top_k || begin >= reader.seen) return;
    int end = std::min(begin + SCORE_CHUNK, reader.seen);
    score_tokens<E>(op, s, r, reader.table(s, op.pages.table), begin, end,
                    at(op.scores, s) + r * score_stride(s) + begin);
}

int index_choice_tiles(const IndexChoice& op, const Step& s) { return rows(op, s); }
template <class E> void index_choice(const IndexChoice& op, const Step& s, int r, void* scratch) {
    Reader reader(s, r);
    int32_t* out = at(op.chosen, s) + r * stride(op.top_k);
    if (reader.seen <= op.top_k) {
        for (int t = 0; t < reader.seen; t++) out[t] = t;
        return;
    }
    float* score = static_cast<float*>(scratch);
    if (fits(op, s))
        score = at(op.scores, s) + r * score_stride(s);
    else
        score_tokens<E>(op, s, r, reader.table(s, op.pages.table), 0, reader.seen, score);
    choose(score, reader.seen, op.top_k, out);
}

HeadShape shape_of(const SparseAttention& op) {
    return {op.num_heads, op.pages.cols, op.value_dim, op.scale};
}
int sparse_attention_tiles(const SparseAttention& op, const Step& s) {
    return rows(op, s) * shape_of(op).tiles();
}
template <class E> void sparse_attention(const SparseAttention& op, const Step& s, int t,
                                         void* scratch) {
    typedef typename E::row T;
    const TokenPages& pages = op.pages;
    HeadShape shape = shape_of(op);
    int64_t r = t / shape.tiles();
    Reader reader(s, r);
    const int32_t* table = reader.table(s, pages.table);
    SparseTile<E> tile(shape, *static_cast<SparseWorkspace<E>*>(scratch), t % shape.tiles());
    tile.gather(at<T>(op.qkv, s) + r * stride((op.num_heads + 1) * pages.cols + op.value_dim));
    const int32_t* chosen = at(op.chosen, s) + r * stride(op.top_k);
    for (int start = 0, count = std::min(reader.seen, op.top_k); start < count;
         start += SPARSE_CHUNK) {
        int mine = std::min(SPARSE_CHUNK, count - start);
        for (int i = 0; i < mine + FACTORS; i++) {
            int token = chosen[start + std::min(i, mine - 1)];
            tile.row[i] = at<T>(pages.latents, s) +
                          int64_t(table[token / pages.page_size]) * pages.latent_step +
                          token % pages.page_size * latent_width(pages);
        }
        tile.attend(mine);
    }
    int64_t width = int64_t(op.num_heads) * op.value_dim;
    tile.write(at<T>(op.out, s) + r * stride(int(width)), nullptr, [](float*) {});
}

}  // namespace

const Kernel token_store_kernel[2] = {per_row<token_store<Bf16>>, per_row<token_store<F32>>};
const Kernel index_scores_kernel[2] = {tiled<index_scores_tiles, index_scores<Bf16>>,
                                       tiled<index_scores_tiles, index_scores<F32>>};
const Kernel index_choice_kernel[2] = {tiled<index_choice_tiles, index_choice<Bf16>>,
                                       tiled<index_choice_tiles, index_choice<F32>>};
const Kernel sparse_attention_kernel[2] = {tiled<sparse_attention_tiles, sparse_attention<Bf16>>,
                                           tiled<sparse_attention_tiles, sparse_attention<F32>>};
