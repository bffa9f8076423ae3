// Paged attention of any mix of prompts and decodes.
//
// Query vectors (row, head of the group) in tiles of QUERY_TILE share the loads of K and V: a tile
// is one row's group when decoding, and spans rows of a prompt. The softmax is taken over chunks of
// KV_CHUNK tokens counted from position 0, and the chunks are merged in order. When there are few
// long requests, chunks are spread over threads (Work::split) and merged by the next op, with the
// same arithmetic.
#include "attention.h"

namespace {

constexpr float LOG2_E = 1.44269504f;

// Softmax weights are computed as powers of two; a score times `unit` is the exponent. If the
// scores need only a positive factor, it is applied with the unit, and the products are used as
// scores.
template <class E> bool raw_scores(const Attention& op, const Workspace<E>& ws) {
    return !ws.k_scale && !(op.softcap > 0) && op.scale > 0 && !op.slopes.present() &&
           !op.biases.present();
}
template <class E> float unit(const Attention& op, const Workspace<E>& ws) {
    return raw_scores(op, ws) ? op.scale * LOG2_E : 1.f;
}

// Added to a vector's scores by the distance of a token to the one at `own` of the chunk: `slope`
// per token after it (ALiBi), 0: none; or one of `distances` numbers of `table`, null: none.
struct Bias {
    float slope;
    const float* table;
    int distances, own;

    Bias(const Attention& op, const Step& s, int head, int own)
        : slope(op.slopes.present() ? at(op.slopes, s)[head] : 0.f),
          table(op.biases.present() ? at(op.biases, s) + int64_t(head) * op.distances : nullptr),
          distances(op.distances), own(own) {}
    vf of(int t) const {  // of 16 tokens
        const int last = distances - 1;
        if (own - (t + LANES - 1) >= last) return splat(table[last]);
        float some[LANES];
        for (int i = 0; i < LANES; i++) some[i] = table[std::clamp(own - t - i, 0, last)];
        return load<vf>(some);
    }
};

template <class E> void finish_scores(const Attention& op, const Workspace<E>& ws, float* score,
                                      int begin, int end, const Bias& bias) {
    vf scale = splat(op.scale);
    float cap = op.softcap;
    for (int t = begin; t < end; t += LANES) {
        vf v = load<vf>(score + t) * scale;
        if (ws.k_scale) v *= load<vf>(ws.k_scale + t);
        if (cap > 0) v = tanh(v / cap) * cap;
        if (bias.slope != 0) v += converted<vf>(lanes() + (t - bias.own)) * bias.slope;
        if (bias.table) v += bias.of(t);
        store(score + t, v * LOG2_E);
    }
}

// Softmax weights of one vector that sees tokens low .. high of the chunk; of these the ones that
// `shown` marks, if it is not null. Vectors of tokens outside give zeros; without marks only the
// two at the ends need masks.
template <class E> void softmax_weights(const Attention& op, Workspace<E>& ws, int i, Span span,
                                        int low, int high, const Bias& bias, const int32_t* shown,
                                        float* part) {
    float* score = ws.score[i];
    auto* weight = ws.weight[i];
    const float* v_scale = ws.v_scale;
    int begin = std::clamp(low / LANES * LANES, span.begin, round_up(span.end, LANES));
    int end = std::min(span.end, high);
    auto cut = [&](vf v, int t, vf other) {
        if (t >= low && t + LANES <= high && !shown) return v;
        vi token = lanes() + t, seen = (token >= low) & (token < high);
        return select(shown ? seen & load<vi>(shown + t) : seen, v, other);
    };
    if (!raw_scores(op, ws)) finish_scores(op, ws, score, begin, end, bias);
    vf top = splat(MASKED_SCORE), total{}, power = splat(unit(op, ws));
    for (int t = begin; t < end; t += LANES)
        top = max(top, cut(load<vf>(score + t), t, splat(MASKED_SCORE)));
    float m = largest(top);
    vf ms = splat(m);
    for (int t = begin; t < end; t += LANES) {
        vf p = cut(exp2((load<vf>(score + t) - ms) * power), t, vf{});
        total += p;
        // a stale scale may be any value
        put(weight + t, v_scale ? cut(p * load<vf>(v_scale + t), t, vf{}) : p);
    }
    for (int t = span.begin; t < begin; t += LANES) put(weight + t, vf{});
    for (int t = round_up(std::max(begin, end), LANES); t < round_up(span.end, 2 * LANES);
         t += LANES)
        put(weight + t, vf{});
    part[0] = m;
    part[1] = sum(total);
}

template <class E> void attend(const Attention& op, const Step& s, const Query& q, int kv_head,
                               int chunk, Workspace<E>& ws, Part* part) {
    Pages<E> pages(op, s, q, kv_head, chunk, ws.wide);
    Span span = pages.span(q);
    if (pages.h.small) pages.widen_keys(span, ws);
    scores(pages, q, span, ws);
    if (pages.h.small) pages.widen_vals(span, ws);
    if (pages.h.shared) pages.values_of_keys(span, ws);
    for (int i = 0, start = chunk * KV_CHUNK; i < q.count; i++) {
        int low = q.low[i] - start, high = q.end[i] - start;
        Bias bias(op, s, q.head[i], high - 1);
        int32_t marks[KV_CHUNK];
        const int32_t* shown = q.shown(i, chunk, marks);
        softmax_weights(op, ws, i, span, low, high, bias, shown, part->of(i, ws.stride));
    }
    values(pages, q, span, ws, part);
}

void merge(float* to, const float* from, int64_t cols, float unit) {
    float m = std::max(to[0], from[0]);
    vf e = exp2(two((to[0] - m) * unit, (from[0] - m) * unit));
    float a = e[0], b = e[1];
    to[0] = m;
    to[1] = to[1] * a + from[1] * b;
    for (int64_t d = PART_HEAD; d < PART_HEAD + cols; d += LANES)
        store(to + d, fma(load<vf>(to + d), splat(a), load<vf>(from + d) * b));
}

// Merges the chunks of a tile in order (online softmax) and writes its output rows.
// `chunk_parts(c)` returns the parts of chunk c.
template <class E, class F> void finish(const Attention& op, const Step& s, const Query& q,
                                        int kv_head, Workspace<E>& ws, F&& chunk_parts) {
    typedef typename E::row T;
    Heads h(op.kv);
    const float* sinks = at(op.sinks, s);
    float power = unit(op, ws);
    for (int c = q.first_chunk(); c <= q.last_chunk(); c++) {
        if (!q.any_sees(c)) continue;
        Part* part = chunk_parts(c);
        for (int i = 0; i < q.count; i++) {
            float *to = ws.all->of(i, ws.stride), *from = part->of(i, ws.stride);
            if (!q.sees(i, c)) continue;
            if (c == q.low[i] / KV_CHUNK)
                memcpy(to, from, ws.stride * sizeof(float));
            else
                merge(to, from, h.v_pad, power);
        }
    }
    int64_t width = int64_t(h.hq) * h.v_dim, out_stride = stride(int(width));
    for (int i = 0; i < q.count; i++) {
        float *all = ws.all->of(i, ws.stride), total = all[1], scale = 1.f;
        if (sinks) {
            float seen = all[0] * power, sink = sinks[q.head[i]] * LOG2_E, m = std::max(seen, sink);
            vf e = exp2(two(seen - m, sink - m));
            scale = e[0];
            total = total * scale + e[1];
        }
        T* out = at<T>(op.out, s) + q.row[i] * out_stride;
        alignas(64) float found[MAX_HEAD + VALUE_PAD];
        for (int d = 0; d < h.v_pad; d += LANES)
            store(found + d, load<vf>(all + PART_HEAD + d) * (scale / total));
        if (h.nibbles) hadamard(found, h.v_dim);
        // + 0: one sign of zero, however many masked zeros were added
        for (int d = 0; d < h.v_pad; d += LANES) {
            T v[LANES];
            put(v, load<vf>(found + d) + 0.f);
            memcpy(out + q.head[i] * h.v_dim + d, v, std::min(LANES, h.v_dim - d) * sizeof(T));
        }
        if (kv_head == 0)
            for (int64_t d = width; d < out_stride; d++) out[d] = 0;
    }
}

Part* parts(const Attention& op, const Step& s) { return reinterpret_cast<Part*>(at(op.parts, s)); }
const Work& work(const Attention& op, const Step& s) { return s.work[op.work]; }
bool split(const Attention& op, const Step& s) {
    const Work& w = work(op, s);
    return w.split && int64_t(w.count) * op.kv.num_kv_heads * w.chunks * part_floats(Heads(op.kv)) *
                              SPLIT_TILE * 4 <=
                          int64_t(op.parts_mib) << 20;
}
int attention_tiles(const Attention& op, const Step& s) {
    return work(op, s).count * op.kv.num_kv_heads * (split(op, s) ? work(op, s).chunks : 1);
}
int merge_tiles(const Attention& op, const Step& s) {
    return split(op, s) ? work(op, s).count * op.kv.num_kv_heads : 0;
}

template <class E> void attention(const Attention& op, const Step& s, int t, void* scratch) {
    const Work& w = work(op, s);
    bool spread = split(op, s);
    int tile = spread ? t / w.chunks : t, kv_head = tile % op.kv.num_kv_heads;
    Query q(op, s, w.items[tile / op.kv.num_kv_heads], kv_head);
    Workspace<E> ws(op, scratch);
    auto gathered = [&] { gather(op, s, q, ws); };
    if (!spread) {
        gathered();
        finish<E>(op, s, q, kv_head, ws, [&](int c) {
            attend<E>(op, s, q, kv_head, c, ws, ws.part);
            return ws.part;
        });
    } else if (int c = t % w.chunks; q.any_sees(c)) {
        gathered();
        attend<E>(op, s, q, kv_head, c, ws, parts(op, s)->tile(t, ws.stride));
    }
}

template <class E> void attention_merge(const Attention& op, const Step& s, int t, void* scratch) {
    const Work& w = work(op, s);
    int kv_head = t % op.kv.num_kv_heads;
    Query q(op, s, w.items[t / op.kv.num_kv_heads], kv_head);
    Workspace<E> ws(op, scratch);
    finish<E>(op, s, q, kv_head, ws,
              [&](int c) { return parts(op, s)->tile(int64_t(t) * w.chunks + c, ws.stride); });
}

}  // namespace

const Kernel attention_kernel[2] = {tiled<attention_tiles, attention<Bf16>>,
                                    tiled<attention_tiles, attention<F32>>};
const Kernel attention_merge_kernel[2] = {tiled<merge_tiles, attention_merge<Bf16>>,
                                          tiled<merge_tiles, attention_merge<F32>>};
