// The parts of paged attention: query tiles, scratch memory, and the two matrix products of a
// chunk.
#pragma once
#include "../native/amx.h"
#include "pages.h"

constexpr float MASKED_SCORE = -1e30f;  // score of a masked token
constexpr int PART_HEAD = LANES;        // floats before the values of a part: maximum, sum, padding

// Partial result of a chunk for one query vector (split-KV): maximum score, sum of weights,
// weighted values.
inline int64_t part_floats(const Heads& h) { return PART_HEAD + h.v_pad; }
struct Part {
    float first;
    float* of(int vector, int64_t floats) { return &first + vector * floats; }
    Part* tile(int64_t index, int64_t floats) {
        return reinterpret_cast<Part*>(&first + index * SPLIT_TILE * floats);
    }
};

// Blocks of tokens that one query vector sees: near its own, and some that depend on its head.
struct VisibleBlocks {
    int own, shift;  // block of the row itself, and what its head adds to the numbers of far ones

    bool show(const BlockMask& mask, int block) const {
        return own - block < mask.near || (block + shift) % mask.stride == 0;
    }
    int first(const BlockMask& mask) const {
        int far = (mask.stride - shift % mask.stride) % mask.stride;
        return std::min(std::max(0, own - mask.near + 1), far);
    }
};

// A tile of query vectors; vector i sees tokens low[i] .. end[i] of its request, except for those
// that `blocks` hide.
struct Query {
    int count, lowest, low[QUERY_TILE], end[QUERY_TILE], head[QUERY_TILE];
    int64_t row[QUERY_TILE];
    const int32_t* table;
    const BlockMask& mask;
    VisibleBlocks blocks[QUERY_TILE];

    Query(const Attention& op, const Step& s, const Item& item, int kv_head)
        : count(item.count), mask(op.blocks) {
        int group = op.kv.num_heads / op.kv.num_kv_heads, window = op.window;
        int start = s.run->row_start[item.seq], rows = s.run->row_start[item.seq + 1] - start;
        bool whole = op.kv.whole_text;
        int before = whole ? 0 : s.run->kv_len[item.seq] - rows;
        table = whole ? s.texts.pages + s.texts.first_page[item.seq]
                      : s.run->page_table + op.kv.table * s.run->table_step +
                            int64_t(s.run->table_row[item.seq]) * s.run->table_stride;
        for (int i = 0; i < count; i++) {
            int r = (item.first + i) / group;
            row[i] = start + r;
            head[i] = kv_head * group + (item.first + i) % group;
            end[i] = before + r + 1;
            low[i] = window ? std::max(0, end[i] - window) : 0;
            if (op.chunk) low[i] = std::max(low[i], (end[i] - 1) / op.chunk * op.chunk);
            if (mask.size) {
                blocks[i] = {(end[i] - 1) / mask.size, (mask.first_head + head[i]) * mask.step + 1};
                low[i] = blocks[i].first(mask) * mask.size;
            }
            if (s.run->row_ends) end[i] = std::max(end[i], s.run->row_ends[row[i]]);
            if (whole) end[i] = window ? std::min(rows, r + window) : rows;
            if (whole && s.run->row_ends) end[i] = std::min(end[i], s.run->row_ends[row[i]]);
        }
        lowest = *std::min_element(low, low + count);
    }
    int first_chunk() const { return lowest / KV_CHUNK; }
    int last_chunk() const { return (end[count - 1] - 1) / KV_CHUNK; }  // rows of a tile ascend
    bool sees(int i, int chunk) const {
        int begin = chunk * KV_CHUNK, stop = std::min(begin + KV_CHUNK, end[i]);
        if (stop <= begin || low[i] >= begin + KV_CHUNK) return false;
        if (!mask.size) return true;
        for (int block = begin / mask.size; block * mask.size < stop; block++)
            if (blocks[i].show(mask, block)) return true;
        return false;
    }
    bool any_sees(int chunk) const {
        for (int i = 0; i < count; i++)
            if (sees(i, chunk)) return true;
        return false;
    }
    // Marks the tokens of a chunk that vector i sees by all ones; null if no block is hidden.
    const int32_t* shown(int i, int chunk, int32_t* marks) const {
        if (!mask.size) return nullptr;
        int begin = chunk * KV_CHUNK;
        for (int t = 0; t < KV_CHUNK;) {
            int block = (begin + t) / mask.size;
            int stop = std::min(KV_CHUNK, (block + 1) * mask.size - begin);
            for (bool show = blocks[i].show(mask, block); t < stop; t++) marks[t] = -int(show);
        }
        return marks;
    }
};

struct Span {  // tokens of a chunk that some vector of the tile sees, from a block's beginning
    int low, begin, end;
};

template <class E> struct Workspace {  // scratch memory of a thread
    typedef typename E::row T;
    int64_t stride;  // floats of a part
    float (*score)[KV_CHUNK];
    T (*weight)[KV_CHUNK];
    T (*q)[MAX_HEAD];
    char* values;  // two rows of tokens a word, of one 32-token block
    Part *part, *all;
    T* wide;  // keys or values of a chunk of pages of bytes, or values that keys hold
    float *k_scale, *v_scale;  // scales of its tokens; null if pages hold T

    Workspace(const Attention& op, void* scratch) : stride(part_floats(Heads(op.kv))) {
        char* p = static_cast<char*>(scratch);
        auto take = [&](int64_t bytes) { return (p += bytes) - bytes; };
        score = (float (*)[KV_CHUNK])take(QUERY_TILE * KV_CHUNK * 4);
        weight = (T(*)[KV_CHUNK])take(QUERY_TILE * KV_CHUNK * sizeof(T));
        q = (T(*)[MAX_HEAD])take(QUERY_TILE * MAX_HEAD * sizeof(T));
        values = take(16 * MAX_HEAD * 4);
        part = (Part*)take(QUERY_TILE * (PART_HEAD + MAX_HEAD) * 4);
        all = (Part*)take(QUERY_TILE * (PART_HEAD + MAX_HEAD) * 4);
        bool small = Heads(op.kv).small;
        k_scale = small ? (float*)take(KV_CHUNK * 4) : nullptr;
        v_scale = small ? (float*)take(KV_CHUNK * 4) : nullptr;
        wide = (T*)p;
    }
};

static_assert(QUERY_TILE * (KV_CHUNK * 8 + MAX_HEAD * 4 + 2 * (PART_HEAD + MAX_HEAD) * 4) +
                  16 * MAX_HEAD * 4 + KV_CHUNK * (8 + MAX_HEAD * 4) <=
              SCRATCH_BYTES);

template <class E> struct Pages {  // the pages of one head in one chunk
    typedef typename E::row T;
    Heads h;
    PageFormat format;
    const T *k, *v, *wide;
    const int32_t* table;
    int head, begin;

    Pages(const Attention& op, const Step& s, const Query& q, int kv_head, int chunk, const T* wide)
        : h(op.kv), format(op.kv.format), k(at<T>(op.kv.keys, s)), v(at<T>(op.kv.values, s)),
          wide(wide), table(q.table), head(kv_head), begin(chunk * KV_CHUNK) {}
    const T* keys(int t) const {  // of 16 tokens
        int token = begin + t;
        if (h.small) return wide + t * h.k_dim;
        return k + h.k_head(table[token / h.page], head) + token % h.page * h.k_dim;
    }
    const T* vals(int t) const {
        int token = begin + t;
        if (h.small || h.shared) return wide + t * h.v_pad;
        return v + h.v_head(table[token / h.page], head) + token % h.page * h.v_pad;
    }
    // Levels are exact in T. Their scales join the scores, and the weights of the values.
    void widen_keys(Span span, Workspace<E>& ws) const {
        auto head_of = [&](int page) { return (const int8_t*)k + h.k_head(page, head); };
        widen(span, h.k_dim, LANES, ws.wide, ws.k_scale, head_of);
    }
    void widen_vals(Span span, Workspace<E>& ws) const {
        auto head_of = [&](int page) { return (const int8_t*)v + h.v_head(page, head); };
        widen(span, h.v_pad, E::ELEMENTS, ws.wide, ws.v_scale, head_of);
    }
    // `together`: tokens whose numbers share a block of columns
    template <class F> void widen(Span span, int64_t cols, int together, T* to, float* scales,
                                  F&& head_of) const {
        int64_t width = h.width(cols);
        for (int t = span.begin; t < span.end; t += LANES) {
            int token = begin + t, offset = token % h.page;
            const int8_t *levels = head_of(table[token / h.page]), *from = levels + offset * width;
            memcpy(scales + t, levels + h.page * width + offset * 4, LANES * 4);
            if (h.nibbles) {
                for (int i = 0; i < LANES; i += together)
                    widen_block(from + i * width, to + (t + i) * cols, together * width);
                continue;
            }
            if (format == PageFormat::FP8_E4M3)
                widen_floats<Float8<4>>((const uint8_t*)from, to + t * cols, LANES * cols);
            else if (format == PageFormat::FP8_E5M2)
                widen_floats<Float8<5>>((const uint8_t*)from, to + t * cols, LANES * cols);
            else
                for (int64_t i = 0; i < LANES * cols; i += LANES) {
                    if (i % 64 == 0) __builtin_prefetch(from + LANES * cols + i);
                    put(to + t * cols + i, widened<int8_t, vf>(from + i));
                }
        }
    }
    template <class F> static void widen_floats(const uint8_t* from, T* to, int64_t count) {
        for (int64_t i = 0; i < count; i += LANES) {
            if (i % 64 == 0) __builtin_prefetch(from + count + i);
            put(to + i, F::value(widened<uint8_t, vu>(from + i)));
        }
    }
    // Bytes of a block, whose low nibbles are its first half.
    static void widen_block(const int8_t* from, T* to, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += LANES) {
            if (i % 64 == 0) __builtin_prefetch(from + LANES * 16 + i);
            vi both = (vi)widened<uint8_t, vu>((const uint8_t*)from + i);
            put(to + i, converted<vf>(both & 15) - NIBBLE_MIDDLE);
            put(to + bytes + i, converted<vf>(both >> 4) - NIBBLE_MIDDLE);
        }
    }
    // The first columns of the keys in the order of values.
    void values_of_keys(Span span, Workspace<E>& ws) const {
        constexpr int e = E::ELEMENTS;
        for (int t = span.begin; t < span.end; t += LANES) {
            const T* from = keys(t);
            T* to = ws.wide + t * h.v_pad;
            for (int64_t d = 0; d < h.v_pad; d += e, from += LANES * e)
                for (int i = 0; i < LANES; i += e)
                    for (int c = 0; c < e; c++)
                        for (int j = 0; j < e; j++)
                            to[i * h.v_pad + (d + c) * e + j] = from[(i + j) * e + c];
        }
        for (int t = span.end; t % e; t++)  // shares words with the newest token; stale
            for (int64_t d = 0; d < h.v_pad; d++) ws.wide[t / e * e * h.v_pad + d * e + t % e] = 0;
    }
    // If one row reads the pages alone they come from memory: prefetch K 64 tokens ahead, and V of
    // the current ones. Rows that share pages find them in the cache.
    void fetch(const Query& q, Span span, int t) const {
        if (h.small || h.shared || q.row[0] != q.row[q.count - 1]) return;
        for (int i = t == span.begin ? 0 : 64; i < 128 && t + i < span.end; i += LANES)
            fetch(keys(t + i), LANES * h.k_dim);
        for (int i = 0; i < 64 && t + i < span.end; i += LANES) fetch(vals(t + i), LANES * h.v_pad);
    }
    static void fetch(const T* p, int64_t count) {
        for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
    }
    Span span(const Query& q) const {
        int low = std::max(0, q.lowest - begin);
        return {low, low / 32 * 32, std::min(q.end[q.count - 1] - begin, KV_CHUNK)};
    }
};

template <class E> void gather(const Attention& op, const Step& s, const Query& q,
                               Workspace<E>& ws) {
    typedef typename E::row T;
    Heads h(op.kv);
    for (int i = 0; i < q.count; i++) {
        memcpy(ws.q[i], at<T>(op.qkv, s) + q.row[i] * h.qkv_stride() + q.head[i] * h.dim,
               h.dim * sizeof(T));
        memset(ws.q[i] + h.dim, 0, (h.k_dim - h.dim) * sizeof(T));
    }
}

#if defined(__AMX_BF16__)
constexpr int Q_STRIDE = MAX_HEAD * 2, SCORE_STRIDE = KV_CHUNK * 4;

static inline void scores_of_two(const Pages<Bf16>& pages, const Query& q, Span span,
                                 Workspace<Bf16>& ws) {
    int steps = int(pages.h.k_dim / 32);
    for (int t = span.begin; t < span.end; t += 32) {  // a missing second block repeats the first
        if ((t - span.begin) % 64 == 0) pages.fetch(q, span, t);
        const bf16 *k0 = pages.keys(t), *k1 = t + 16 < span.end ? pages.keys(t + 16) : k0;
        zero_four();
        for (int d = 0; d < steps; d++) {
            tile_load<4>(ws.q[0] + d * 32, Q_STRIDE);
            tile_load<6>(k0 + d * 512, 64);
            tile_load<7>(k1 + d * 512, 64);
            tile_load<5>(ws.q[TILE] + d * 32, Q_STRIDE);
            TilesBf16::dot<0, 4, 6>();
            TilesBf16::dot<1, 4, 7>();
            TilesBf16::dot<2, 5, 6>();
            TilesBf16::dot<3, 5, 7>();
        }
        float *out = ws.score[0] + t, *lower = ws.score[TILE] + t;
        tile_store<0>(out, SCORE_STRIDE);
        tile_store<1>(out + 16, SCORE_STRIDE);
        tile_store<2>(lower, SCORE_STRIDE);
        tile_store<3>(lower + 16, SCORE_STRIDE);
    }
}

static inline void scores(const Pages<Bf16>& pages, const Query& q, Span span,
                          Workspace<Bf16>& ws) {
    if (q.count > TILE) return scores_of_two(pages, q, span, ws);
    int steps = int(pages.h.k_dim / 32);
    for (int t = span.begin; t < span.end; t += 64) {  // a missing block repeats the one before it
        pages.fetch(q, span, t);
        const bf16* k[4];
        for (int i = 0; i < 4; i++)
            k[i] = t + 16 * i < span.end ? pages.keys(t + 16 * i) : k[i - 1];
        zero_four();
        for (int d = 0; d < steps; d++) {
            tile_load<4>(ws.q[0] + d * 32, Q_STRIDE);
            tile_load<5>(k[0] + d * 512, 64);
            tile_load<6>(k[1] + d * 512, 64);
            TilesBf16::dot<0, 4, 5>();
            TilesBf16::dot<1, 4, 6>();
            tile_load<5>(k[2] + d * 512, 64);
            tile_load<6>(k[3] + d * 512, 64);
            TilesBf16::dot<2, 4, 5>();
            TilesBf16::dot<3, 4, 6>();
        }
        float* out = ws.score[0] + t;
        tile_store<0>(out, SCORE_STRIDE);
        tile_store<1>(out + 16, SCORE_STRIDE);
        tile_store<2>(out + 32, SCORE_STRIDE);
        tile_store<3>(out + 48, SCORE_STRIDE);
    }
}

// 32 tokens of V with a row of tokens pairs every `v_pad` words: in place, or copied where the
// block is split or partly stale.
static inline const bf16* value_block(const Pages<Bf16>& pages, Span span, int t,
                                      Workspace<Bf16>& ws) {
    int64_t row = pages.h.v_pad * 2;
    if ((pages.h.small || pages.h.shared || pages.h.page % 32 == 0) && t + 32 <= span.end)
        return pages.vals(t);
    auto* copy = reinterpret_cast<bf16*>(ws.values);
    for (int pair = 0; pair < 16; pair++) {
        int token = t + 2 * pair;
        if (token >= span.end || token + 1 < span.low)
            memset(copy + pair * row, 0, row * 2);
        else
            memcpy(copy + pair * row, pages.vals(token / 16 * 16) + token % 16 / 2 * row, row * 2);
    }
    return copy;
}

static inline void values_of_two(const Pages<Bf16>& pages, Span span, Workspace<Bf16>& ws,
                                 Part* part) {
    int64_t row = pages.h.v_pad * 4, out = ws.stride * 4;
    float* o = part->of(0, ws.stride) + PART_HEAD;
    float* lower = part->of(TILE, ws.stride) + PART_HEAD;
    for (int64_t d = 0; d < pages.h.v_pad; d += 32) {
        bool both = d + 16 < pages.h.v_pad;
        zero_four();
        for (int t = span.begin; t < span.end; t += 32) {
            const bf16* v = value_block(pages, span, t, ws) + d * 2;
            tile_load<4>(ws.weight[0] + t, KV_CHUNK * 2);
            tile_load<6>(v, row);
            tile_load<5>(ws.weight[TILE] + t, KV_CHUNK * 2);
            TilesBf16::dot<0, 4, 6>();
            TilesBf16::dot<2, 5, 6>();
            if (both) {
                tile_load<7>(v + 32, row);
                TilesBf16::dot<1, 4, 7>();
                TilesBf16::dot<3, 5, 7>();
            }
        }
        tile_store<0>(o + d, out);
        tile_store<2>(lower + d, out);
        if (both) {
            tile_store<1>(o + d + 16, out);
            tile_store<3>(lower + d + 16, out);
        }
    }
}

static inline void values(const Pages<Bf16>& pages, const Query& q, Span span, Workspace<Bf16>& ws,
                          Part* part) {
    if (q.count > TILE) return values_of_two(pages, span, ws, part);
    int64_t row = pages.h.v_pad * 4, out = ws.stride * 4;
    float* o = part->of(0, ws.stride) + PART_HEAD;
    for (int64_t d = 0; d < pages.h.v_pad; d += 64) {
        int64_t count = std::min<int64_t>(4, (pages.h.v_pad - d) / 16);
        zero_four();
        for (int t = span.begin; t < span.end; t += 32) {
            const bf16* v = value_block(pages, span, t, ws) + d * 2;
            tile_load<4>(ws.weight[0] + t, KV_CHUNK * 2);
            tile_load<5>(v, row);
            TilesBf16::dot<0, 4, 5>();
            if (count > 1) {
                tile_load<6>(v + 32, row);
                TilesBf16::dot<1, 4, 6>();
            }
            if (count > 2) {
                tile_load<5>(v + 64, row);
                TilesBf16::dot<2, 4, 5>();
            }
            if (count > 3) {
                tile_load<6>(v + 96, row);
                TilesBf16::dot<3, 4, 6>();
            }
        }
        tile_store<0>(o + d, out);
        if (count > 1) tile_store<1>(o + d + 16, out);
        if (count > 2) tile_store<2>(o + d + 32, out);
        if (count > 3) tile_store<3>(o + d + 48, out);
    }
}
#endif

// with two vectors of columns each
constexpr int PAIR_ROWS = std::max(1, TILE_ROWS* TILE_COLS / 2);

template <class E> void scores(const Pages<E>& pages, const Query& q, Span span, Workspace<E>& ws) {
    int words = int(pages.h.k_dim) / E::ELEMENTS;
    for (int m = 0; m < q.count; m += PAIR_ROWS)
        constant<PAIR_ROWS>(std::min(PAIR_ROWS, q.count - m), [&](auto M) {
            // two blocks at a time; a missing second one repeats the first
            for (int t = span.begin; t < span.end; t += 32) {
                if (m == 0 && (t - span.begin) % 64 == 0) pages.fetch(q, span, t);
                const auto* k0 = (const uint32_t*)pages.keys(t);
                const auto* k1 = t + 16 < span.end ? (const uint32_t*)pages.keys(t + 16) : k0;
                vf acc[M][2] = {};
                multiply<E, M, 2>(acc, (const uint32_t*)ws.q[m], MAX_HEAD / E::ELEMENTS, k0,
                                  k1 - k0, LANES, words);
                for (int i = 0; i < M; i++) {
                    store(ws.score[m + i] + t, acc[i][0]);
                    store(ws.score[m + i] + t + 16, acc[i][1]);
                }
            }
        });
}

template <class E, int M, int N>
void weigh(const Pages<E>& pages, Span span, const Workspace<E>& ws, Part* part, int m, int d) {
    constexpr int e = E::ELEMENTS;
    vf acc[M][N] = {};
    // earlier tokens have no weight, and may be NaN
    for (int t = span.low / LANES * LANES; t < span.end; t += LANES) {
        int words = std::min(LANES / e, ceil_div(span.end - t, e));
        multiply<E, M, N>(acc, (const uint32_t*)(ws.weight[m] + t), KV_CHUNK / e,
                          (const uint32_t*)pages.vals(t) + d, LANES, pages.h.v_pad, words);
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            store(part->of(m + i, ws.stride) + PART_HEAD + d + j * LANES, acc[i][j]);
}

template <class E> void values(const Pages<E>& pages, const Query& q, Span span, Workspace<E>& ws,
                               Part* part) {
    for (int m = 0; m < q.count; m += PAIR_ROWS)
        constant<PAIR_ROWS>(std::min(PAIR_ROWS, q.count - m), [&](auto M) {
            int d = 0, cols = int(pages.h.v_pad);
            if constexpr (M <= 4 && TILE_COLS > 1)
                for (; d + 64 <= cols; d += 64) weigh<E, M, 4>(pages, span, ws, part, m, d);
            for (; d + 32 <= cols; d += 32) weigh<E, M, 2>(pages, span, ws, part, m, d);
            if (d < cols) weigh<E, M, 1>(pages, span, ws, part, m, d);
        });
}
