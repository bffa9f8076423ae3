// Latent attention before and after paged attention: splits rows into heads, and multiplies each
// head by its own matrix. For that, heads are copied to a stack with a row per head and token, head
// by head, so that each head is a group of rows (see tiling.h). If the columns of a head are whole
// tiles, they are read and written in place instead.
#include "../matmul/tiling.h"
#include "../paged/rope.h"

namespace {

// Rotates columns of the queries; norms and rotates the key, and derives its value. The resulting
// rows hold query heads (latent and rotated columns), the key in the same layout, and the latent
// value. Products write the latent columns of the heads later.
template <class T> void latent_rows(const LatentRows& op, const Step& s, int64_t r) {
    int heads = op.num_heads, nope = op.qk_nope_head_dim, rotary = op.qk_rope_head_dim;
    int latent = op.kv_lora_rank, dim = latent + rotary;
    Rope none{nullptr, nullptr, 0, false}, rope = none;
    if (op.cos_sin.present()) {
        const float* cos = at(op.cos_sin, s) + int64_t(s.run->positions[r]) * rotary;
        rope = {cos, cos + rotary / 2, rotary, op.interleaved != 0};
    }
    Norm no_norm{nullptr, 0, 0}, norm{at(op.norm, s), op.eps, 0};
    const T* q = at<T>(op.q, s) + r * stride(heads * (nope + rotary));
    const T* kv = at<T>(op.kv, s) + r * stride(dim);
    int width = (heads + 1) * dim + latent;
    T *out = at<T>(op.out, s) + r * stride(width), *key = out + heads * dim;
    T head[MAX_HEAD + KEY_PAD];
    for (int h = 0; h < heads; h++) {
        prepare(q + h * (nope + rotary) + nope, head, rotary, no_norm, rope);
        memcpy(out + h * dim + latent, head, rotary * sizeof(T));
    }
    prepare(kv, head, latent, norm, none);
    memcpy(key, head, latent * sizeof(T));
    memcpy(key + dim, head, latent * sizeof(T));
    prepare(kv + latent, head, rotary, no_norm, rope);
    memcpy(key + latent, head, rotary * sizeof(T));
    for (int64_t d = width; d < stride(width); d++) out[d] = 0;
}

void head_groups(const HeadGroups& op, const Step& s, int, void*) {
    int32_t *groups = at(op.groups, s), *group = groups + 1;
    int tokens = rows(op, s);
    for (int h = 0; h < op.num_heads; h++)
        for (int i = 0; i < tokens; i += LINEAR_ROWS, group += 3) {
            group[0] = h;
            group[1] = (op.in_place ? 0 : h * tokens) + i;
            group[2] = std::min(LINEAR_ROWS, tokens - i);
        }
    groups[0] = int(group - groups - 1) / 3;
}
int one_call(const Op&, const Step&) { return 1; }

template <class T> void to_stack(const ToStack& op, const Step& s, int64_t r) {
    int64_t width = op.width, padded = stride(op.width), tokens = rows(op, s);
    const T* x = at<T>(op.x, s) + r * stride(op.cols);
    for (int h = 0; h < op.num_heads; h++) {
        T* out = at<T>(op.stack, s) + (h * tokens + r) * padded;
        memcpy(out, x + int64_t(h) * op.step, width * sizeof(T));
        for (int64_t d = width; d < padded; d++) out[d] = 0;
    }
}

// Columns after the last head stay unchanged, except for the padding.
template <class T> void from_stack(const FromStack& op, const Step& s, int64_t r) {
    int64_t width = op.width, padded = stride(op.width), tokens = rows(op, s);
    T* out = at<T>(op.out, s) + r * stride(op.cols);
    for (int h = 0; h < op.num_heads; h++)
        memcpy(out + int64_t(h) * op.step, at<T>(op.stack, s) + (h * tokens + r) * padded,
               width * sizeof(T));
    for (int64_t d = op.cols; d < stride(op.cols); d++) out[d] = 0;
}

}  // namespace

const Kernel latent_rows_kernel[2] = {per_row<latent_rows<bf16>>, per_row<latent_rows<float>>};
const Kernel head_groups_kernel[2] = {tiled<one_call, head_groups>, tiled<one_call, head_groups>};
const Kernel to_stack_kernel[2] = {per_row<to_stack<bf16>>, per_row<to_stack<float>>};
const Kernel from_stack_kernel[2] = {per_row<from_stack<bf16>>, per_row<from_stack<float>>};
