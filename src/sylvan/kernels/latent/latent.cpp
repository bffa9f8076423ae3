// Latent attention around the paged one: rows into heads, and heads as a stack of matrices whose rows have weights of their
// own. A stack has a row for each head and token, head by head, so that each head is a group of rows (see tiling.h); where the columns
// of heads are whole tiles they are read and written in place instead.
#include "../matmul/tiling.h"
#include "../paged/turn.h"

namespace {

// The turned columns of the queries, and the one key, normed and turned, with its value. Rows of attention: heads of latent
// and turned columns, the key likewise, the latent value; the latent columns of the heads come later.
// buf: q, latent | key, cos|sin f32, norm weight f32, rows of attention
// n: heads, columns of a query head that do not turn, columns that turn, latent columns, interleaved; f: eps
template <class T> void latent_rows(const Op& op, const Step& s, int64_t r) {
    int heads = op.n[0], nope = op.n[1], turning = op.n[2], latent = op.n[3], dim = latent + turning;
    const float* cos = at<float>(op, s, 2) + int64_t(s.run->positions[r]) * turning;
    Turn turn{cos, cos + turning / 2, turning, op.n[4] != 0}, still{nullptr, nullptr, 0, false};
    Norm none{nullptr, 0, 0}, norm{at<float>(op, s, 3), op.f[0], 0};
    const T* q = at<T>(op, s, 0) + r * stride(heads * (nope + turning));
    const T* kv = at<T>(op, s, 1) + r * stride(dim);
    int width = (heads + 1) * dim + latent;
    T *out = at<T>(op, s, 4) + r * stride(width), *key = out + heads * dim, head[MAX_HEAD + KEY_PAD];
    for (int h = 0; h < heads; h++) {
        prepare(q + h * (nope + turning) + nope, head, turning, none, turn);
        memcpy(out + h * dim + latent, head, turning * sizeof(T));
    }
    prepare(kv, head, latent, norm, still);
    memcpy(key, head, latent * sizeof(T));
    memcpy(key + dim, head, latent * sizeof(T));
    prepare(kv + latent, head, turning, none, turn);
    memcpy(key + latent, head, turning * sizeof(T));
    for (int64_t d = width; d < stride(width); d++) out[d] = 0;
}

// buf: groups; n: heads, whether all are of the same rows
void head_groups(const Op& op, const Step& s, int, void*) {
    int32_t *groups = at<int32_t>(op, s, 0), *group = groups + 1;
    int tokens = rows(op, s);
    for (int h = 0; h < op.n[0]; h++)
        for (int i = 0; i < tokens; i += LINEAR_ROWS, group += 3)
            group[0] = h, group[1] = (op.n[1] ? 0 : h * tokens) + i, group[2] = std::min(LINEAR_ROWS, tokens - i);
    groups[0] = int(group - groups - 1) / 3;
}
int one_call(const Op&, const Step&) { return 1; }

// buf: rows, stack; n: heads, columns of a head in the stack, from one head to the next in a row, columns of a row
template <class T> void to_stack(const Op& op, const Step& s, int64_t r) {
    int64_t width = op.n[1], padded = stride(op.n[1]), tokens = rows(op, s);
    const T* x = at<T>(op, s, 0) + r * stride(op.n[3]);
    for (int h = 0; h < op.n[0]; h++) {
        T* out = at<T>(op, s, 1) + (h * tokens + r) * padded;
        memcpy(out, x + int64_t(h) * op.n[2], width * sizeof(T));
        for (int64_t d = width; d < padded; d++) out[d] = 0;
    }
}

// buf: stack, rows; n: as to_stack. Columns of a row behind the last head are left as they are, but for the padding.
template <class T> void from_stack(const Op& op, const Step& s, int64_t r) {
    int64_t width = op.n[1], padded = stride(op.n[1]), tokens = rows(op, s);
    T* out = at<T>(op, s, 1) + r * stride(op.n[3]);
    for (int h = 0; h < op.n[0]; h++)
        memcpy(out + int64_t(h) * op.n[2], at<T>(op, s, 0) + (h * tokens + r) * padded, width * sizeof(T));
    for (int64_t d = op.n[3]; d < stride(op.n[3]); d++) out[d] = 0;
}

}  // namespace

const Kernel latent_rows_kernel[2] = {{row_tiles, by_rows<latent_rows<bf16>>}, {row_tiles, by_rows<latent_rows<float>>}};
const Kernel head_groups_kernel[2] = {{one_call, head_groups}, {one_call, head_groups}};
const Kernel to_stack_kernel[2] = {{row_tiles, by_rows<to_stack<bf16>>}, {row_tiles, by_rows<to_stack<float>>}};
const Kernel from_stack_kernel[2] = {{row_tiles, by_rows<from_stack<bf16>>}, {row_tiles, by_rows<from_stack<float>>}};
