// Compressed attention (DeepSeek V4): entries as running sums over tokens, their store, the choice
// among them, and attention of a row to a window of tokens and to entries.
#include "../scan/scan.h"
#include "../sparse/tile.h"

namespace {

using namespace sparse;

constexpr int SCAN_COLS = 4 * LANES;

// Rows of the tokens of one request.
template <class T> struct Tokens {
    const TokenRows& rows;
    T* memory;
    const int32_t* table;

    Tokens(const TokenRows& rows, const Step& s, const Reader& reader)
        : rows(rows), memory(at<T>(rows.memory, s)), table(reader.table(s, rows.table)) {}
    T* of(int token) const {
        return memory + int64_t(table[token / rows.page_size]) * rows.step +
               int64_t(token % rows.page_size) * rows.width;
    }
};

// Entries of one request. An entry is spread over the last tokens of those that it stands for.
template <class T> struct Entries {
    const EntryRows& rows;
    Tokens<T> tokens;
    int part;  // columns that a token has

    Entries(const EntryRows& rows, const Step& s, const Reader& reader)
        : rows(rows), tokens(rows.tokens, s, reader), part(rows.width / rows.block) {}
    template <class F> void each_part(int entry, F&& f) const {
        int first = entry * rows.rate + rows.rate - rows.block;
        for (int b = 0; b < rows.block; b++) f(b * part, tokens.of(first + b) + rows.column);
    }
    void read(int entry, T* to) const {
        each_part(entry, [&](int d, const T* from) { memcpy(to + d, from, part * sizeof(T)); });
    }
    void write(int entry, const T* from) const {
        each_part(entry, [&](int d, T* to) { memcpy(to, from + d, part * sizeof(T)); });
    }
};

Rope rope_at(const float* table, int64_t position, int dim) {
    const float* row = table + position * dim;
    return {row, row + dim / 2, dim, true};
}

// Widens a head, multiplies it by `scale`, and rotates its last columns.
template <class T> void rotate(const T* in, float* out, int cols, float scale, const Rope& rope) {
    for (int d = 0; d < cols; d += LANES) store(out + d, get(in + d) * scale);
    rotate(out + cols - rope.dim, rope);
}
template <class T> void round_to(T* out, const float* in, int cols) {
    for (int d = 0; d < cols; d += LANES) scans::put(out + d, load<vf>(in + d), cols - d);
}

template <class T> void turn_heads(const TurnHeads& op, const Step& s, int64_t r) {
    alignas(64) float head[MAX_HEAD + LANES];
    Rope rope = rope_at(at(op.cos_sin, s), s.run->positions[r], op.rotary_dim);
    T* x = at<T>(op.x, s) + r * stride(op.num_heads * op.head_dim);
    for (int h = 0; h < op.num_heads; h++, x += op.head_dim) {
        rotate(x, head, op.head_dim, op.norm ? inverse_rms(x, op.head_dim, op.eps) : 1.f, rope);
        round_to(x, head, op.head_dim);
    }
}

template <class T> void key_store(const KeyStore& op, const Step& s, int64_t r) {
    alignas(64) float head[MAX_HEAD + LANES];
    Rope rope = rope_at(at(op.cos_sin, s), s.run->positions[r], op.rotary_dim);
    rotate(at<T>(op.x, s) + r * stride(op.cols), head, op.cols, 1.f, rope);
    const TokenRows& tokens = op.tokens;
    int slot = s.run->slots[int64_t(tokens.table) * s.run->slot_step + r];
    T* key = at<T>(tokens.memory, s) + int64_t(slot / tokens.page_size) * tokens.step +
             int64_t(slot % tokens.page_size) * tokens.width;
    round_to(key, head, op.cols);
}

struct Sums {  // of some tokens: largest logit, weights relative to it, and what they weigh
    vf top, weights, total;

    void add(vf logit, vf value) {
        vf most = max(top, logit), fade = exp(top - most), weight = exp(logit - most);
        weights = weights * fade + weight;
        total = total * fade + weight * value;
        top = most;
    }
};
static inline Sums no_tokens() { return {splat(UNSEEN), vf{}, vf{}}; }

// A tile is a block of columns of a request.
int scan_blocks(const EntryScan& op) { return ceil_div(op.cols, SCAN_COLS); }
int entry_scan_tiles(const EntryScan& op, const Step& s) { return s.run->seqs * scan_blocks(op); }

struct EntryScanner {  // one vector of columns, from column `first` on
    const EntryScan& op;
    const Step& s;
    int first, left, parts;
    Sums sums[2] = {};  // with overlap: for the next entry, and of the current one

    EntryScanner(const EntryScan& op, const Step& s, int first)
        : op(op), s(s), first(first), left(op.cols - first), parts(op.overlaps ? 2 : 1) {}
    float* state(int slot, int part) const {
        return at(op.state, s) + ((int64_t(slot) * parts + part) * 3) * op.cols + first;
    }
    void open(int slot, bool fresh) {
        for (int p = 0; p < parts; p++) {
            const float* from = state(slot, p);
            sums[p] = fresh ? no_tokens()
                            : Sums{scans::get(from, left), scans::get(from + op.cols, left),
                                   scans::get(from + 2 * op.cols, left)};
        }
    }
    void add(int row, int token) {
        int64_t width = stride(parts * op.cols) * row + first;
        for (int p = 0; p < parts; p++) {
            int64_t place = width + p * op.cols;
            const float* bias = at(op.bias, s) + int64_t(token) * op.bias_stride + first;
            vf logit = scans::get(at(op.logits, s) + place, left);
            logit += scans::get(bias + p * op.cols, left);
            sums[p].add(logit, scans::get(at(op.values, s) + place, left));
        }
        if (token < op.rate - 1) return;
        const Sums& done = sums[parts - 1];
        scans::put(at(op.out, s) + row * stride(op.cols) + first, done.total / done.weights, left);
        if (op.overlaps) sums[1] = sums[0];
        sums[0] = no_tokens();
    }
    void keep(int slot) const {
        for (int p = 0; p < parts; p++) {
            float* to = state(slot, p);
            scans::put(to, sums[p].top, left);
            scans::put(to + op.cols, sums[p].weights, left);
            scans::put(to + 2 * op.cols, sums[p].total, left);
        }
    }
};

void entry_scan(const EntryScan& op, const Step& s, int t, void*) {
    int seq = t / scan_blocks(op), begin = t % scan_blocks(op) * SCAN_COLS;
    const scans::Span span = scans::span(*s.run, seq);
    int position = s.run->kv_len[seq] - span.rows;
    for (int d = begin; d < std::min(begin + SCAN_COLS, op.cols); d += LANES) {
        EntryScanner scanner(op, s, d);
        scanner.open(span.slot, position == 0);
        scans::walk(
            *s.run, span,
            [&](int row) { scanner.add(row, (position + row - span.start) % op.rate); },
            [&](int slot) { scanner.keep(slot); });
    }
}

template <class T> void entry_store(const EntryStore& op, const Step& s, int64_t r) {
    Reader reader(s, r);
    if (reader.seen % op.entries.rate) return;
    int entry = reader.seen / op.entries.rate - 1;
    const float *x = at(op.x, s) + r * stride(op.cols), *norm = at(op.norm, s);
    alignas(64) float head[MAX_HEAD + LANES];
    float scale = inverse_rms(x, op.cols, op.eps);
    for (int d = 0; d < op.cols; d += LANES)
        store(head + d, load<vf>(x + d) * scale * load<vf>(norm + d));
    Rope rope = rope_at(at(op.cos_sin, s), int64_t(entry) * op.entries.rate, op.rotary_dim);
    rotate(head + op.cols - op.rotary_dim, rope);
    T rounded[MAX_HEAD + LANES];
    round_to(rounded, head, op.cols);
    Entries<T>(op.entries, s, reader).write(entry, rounded);
}

template <class E> struct IndexWorkspace {  // scratch memory of a thread
    typedef typename E::row T;
    T q[MAX_INDEX * SPARSE_HEADS];
    float score[SPARSE_CHUNK][SPARSE_HEADS];
    T key[SPARSE_CHUNK][MAX_INDEX];

    float* scores() { return reinterpret_cast<float*>(this + 1); }  // to the end of the memory
};
static_assert(sizeof(IndexWorkspace<F32>) + 4 * MAX_ENTRIES <= SCRATCH_BYTES);

// Scores of entries begin .. end to `out`: heads are added in order.
template <class E> void score_entries(const EntryScores& op, const Step& s, int64_t r,
                                      const Reader& reader, int begin, int end, float* out,
                                      IndexWorkspace<E>& ws) {
    typedef typename E::row T;
    Entries<T> entries(op.entries, s, reader);
    int heads = op.num_heads, cols = op.entries.width;
    const T* q = at<T>(op.q, s) + r * stride(heads * cols);
    const float* weights = at(op.weights, s) + r * stride(heads);
    std::fill(out, out + (end - begin), 0.f);
    for (int first = 0; first < heads; first += SPARSE_HEADS) {
        int mine = std::min(SPARSE_HEADS, heads - first), blocks = ceil_div(mine, LANES);
        gather_heads<E>(ws.q, q + int64_t(first) * cols, cols, mine);
        for (int start = begin; start < end; start += SPARSE_CHUNK) {
            int count = std::min(SPARSE_CHUNK, end - start);
            const T* row[SPARSE_CHUNK + FACTORS];
            for (int i = 0; i < count; i++) entries.read(start + i, ws.key[i]);
            for (int i = 0; i < count + FACTORS; i++) row[i] = ws.key[std::min(i, count - 1)];
            constant<2>(blocks,
                        [&](auto N) { score_rows<E, N>(ws.q, cols, row, count, ws.score); });
            for (int i = 0; i < count; i++)
                for (int b = 0; b < blocks; b++) {
                    vf weight = scans::get(weights + first + b * LANES, mine - b * LANES);
                    vf score = max(load<vf>(ws.score[i] + b * LANES), vf{});
                    out[start - begin + i] += sum(score * weight);
                }
        }
    }
}

int max_entries(const EntryScores& op, const Step& s) { return longest(s) / op.entries.rate; }
bool fits(const EntryScores& op, const Step& s) {
    return int64_t(rows(op, s)) * max_entries(op, s) * 4 <= int64_t(op.scores_mib) << 20;
}
float* kept_scores(const EntryScores& op, const Step& s, int64_t r) {
    return at(op.scores, s) + r * max_entries(op, s);
}

int entry_scores_tiles(const EntryScores& op, const Step& s) {
    int most = max_entries(op, s);
    return most > op.top_k && fits(op, s) ? rows(op, s) * ceil_div(most, SCORE_CHUNK) : 0;
}
template <class E> void entry_scores(const EntryScores& op, const Step& s, int t, void* scratch) {
    int chunks = ceil_div(max_entries(op, s), SCORE_CHUNK), r = t / chunks;
    int begin = t % chunks * SCORE_CHUNK;
    Reader reader(s, r);
    int count = reader.seen / op.entries.rate;
    if (count <= op.top_k || begin >= count) return;
    score_entries(op, s, r, reader, begin, std::min(begin + SCORE_CHUNK, count),
                  kept_scores(op, s, r) + begin, *static_cast<IndexWorkspace<E>*>(scratch));
}

int entry_choice_tiles(const EntryChoice& op, const Step& s) { return rows(op, s); }
template <class E> void entry_choice(const EntryChoice& op, const Step& s, int r, void* scratch) {
    Reader reader(s, r);
    int count = reader.seen / op.entries.rate;
    int32_t* out = at(op.chosen, s) + r * stride(op.top_k);
    if (count <= op.top_k) {
        for (int i = 0; i < count; i++) out[i] = i;
        return;
    }
    auto& ws = *static_cast<IndexWorkspace<E>*>(scratch);
    float* score = ws.scores();
    if (fits(op, s))
        score = kept_scores(op, s, r);
    else
        score_entries(op, s, r, reader, 0, count, score, ws);
    choose(score, count, op.top_k, out);
}

template <class E> struct CompressedWorkspace {  // scratch memory of a thread
    typedef typename E::row T;
    SparseWorkspace<E> tile;
    T entry[SPARSE_CHUNK][MAX_HEAD];
};
static_assert(sizeof(CompressedWorkspace<F32>) <= SCRATCH_BYTES);

HeadShape shape_of(const CompressedAttention& op) {
    return {op.num_heads, op.head_dim, op.head_dim, op.scale};
}
int compressed_attention_tiles(const CompressedAttention& op, const Step& s) {
    return rows(op, s) * shape_of(op).tiles();
}
template <class E> void compressed_attention(const CompressedAttention& op, const Step& s, int t,
                                             void* scratch) {
    typedef typename E::row T;
    HeadShape shape = shape_of(op);
    int64_t r = t / shape.tiles();
    Reader reader(s, r);
    auto& ws = *static_cast<CompressedWorkspace<E>*>(scratch);
    SparseTile<E> tile(shape, ws.tile, t % shape.tiles());
    int64_t width = stride(op.num_heads * op.head_dim);
    tile.gather(at<T>(op.q, s) + r * width);
    auto attend = [&](int begin, int end, auto&& row_of) {
        for (int start = begin; start < end; start += SPARSE_CHUNK) {
            int count = std::min(SPARSE_CHUNK, end - start);
            for (int i = 0; i < count; i++) tile.row[i] = row_of(start + i, i);
            for (int i = count; i < count + FACTORS; i++) tile.row[i] = tile.row[count - 1];
            tile.attend(count);
        }
    };
    Tokens<T> tokens(op.tokens, s, reader);
    attend(std::max(0, reader.seen - op.window), reader.seen,
           [&](int token, int) { return tokens.of(token); });
    if (op.entries.rate) {
        Entries<T> entries(op.entries, s, reader);
        int seen = reader.seen / op.entries.rate;
        const int32_t* chosen = at(op.chosen, s);
        if (chosen) chosen += r * stride(op.top_k);
        attend(0, chosen ? std::min(seen, op.top_k) : seen, [&](int number, int i) {
            entries.read(chosen ? chosen[number] : number, ws.entry[i]);
            return ws.entry[i];
        });
    }
    Rope rope = rope_at(at(op.cos_sin, s), s.run->positions[r], op.rotary_dim);
    float back[MAX_HEAD];
    for (int d = 0; d < rope.dim / 2; d++) back[d] = -rope.sin[d];
    rope.sin = back;
    tile.write(at<T>(op.out, s) + r * width, at(op.sinks, s),
               [&](float* head) { rotate(head + op.head_dim - rope.dim, rope); });
}

}  // namespace

const Kernel turn_heads_kernel[2] = {per_row<turn_heads<bf16>>, per_row<turn_heads<float>>};
const Kernel key_store_kernel[2] = {per_row<key_store<bf16>>, per_row<key_store<float>>};
const Kernel entry_scan_kernel[2] = {tiled<entry_scan_tiles, entry_scan>,
                                     tiled<entry_scan_tiles, entry_scan>};
const Kernel entry_store_kernel[2] = {per_row<entry_store<bf16>>, per_row<entry_store<float>>};
const Kernel entry_scores_kernel[2] = {tiled<entry_scores_tiles, entry_scores<Bf16>>,
                                       tiled<entry_scores_tiles, entry_scores<F32>>};
const Kernel entry_choice_kernel[2] = {tiled<entry_choice_tiles, entry_choice<Bf16>>,
                                       tiled<entry_choice_tiles, entry_choice<F32>>};
const Kernel compressed_attention_kernel[2] = {
    tiled<compressed_attention_tiles, compressed_attention<Bf16>>,
    tiled<compressed_attention_tiles, compressed_attention<F32>>};
