// Selects rows, and computes on whole rows.
#include "../native/kernel.h"

namespace {

template <class T> void take_rows(const TakeRows& op, const Step& s, int64_t r) {
    int64_t width = stride(op.cols);
    memcpy(at<T>(op.out, s) + r * width, at<T>(op.x, s) + s.run->out_rows[r] * width,
           width * sizeof(T));
}

template <class T> void join_columns(const JoinColumns& op, const Step& s, int64_t r) {
    T* out = at<T>(op.out, s) + r * stride(op.cols);
    memcpy(out, at<T>(op.a, s) + r * stride(op.a_cols), op.a_cols * sizeof(T));
    memcpy(out + op.a_cols, at<T>(op.b, s) + r * stride(op.b_cols), op.b_cols * sizeof(T));
    std::fill(out + op.cols, out + stride(op.cols), T(0));
}

// Reads an operand that is float32 if `f32`, else T as the rows are.
template <class T> vf read(Buf<void> x, const Step& s, bool f32, int64_t i) {
    return f32 ? get(at<float>(x, s) + i) : get(at<T>(x, s) + i);
}
template <class T> void write(Buf<void> out, const Step& s, bool f32, int64_t i, vf v) {
    if (f32)
        put(at<float>(out, s) + i, v);
    else
        put(at<T>(out, s) + i, v);
}

template <class T> void add(const Add& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        write<T>(op.out, s, op.out_f32, i,
                 read<T>(op.a, s, op.a_f32, i) * op.a_scale +
                     read<T>(op.b, s, op.b_f32, i) * op.scale);
}

template <class T> void scale(const Scale& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        write<T>(op.out, s, op.f32, i, read<T>(op.x, s, op.f32, i) * op.factor);
}

template <class T> void softcap(const Softcap& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        write<T>(op.out, s, op.f32, i, tanh(read<T>(op.x, s, op.f32, i) / op.cap) * op.cap);
}

template <class T> void clamp(const Clamp& op, const Step& s, int64_t r) {
    vf limit = splat(op.limit);
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        put(at<T>(op.out, s) + i, max(min(get(at<T>(op.x, s) + i), limit), -limit));
}

template <class T> void scale_rows(const ScaleRows& op, const Step& s, int64_t r) {
    vf factor = splat(get(at<T>(op.factors, s) + r * stride(1))[0]);
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        put(at<T>(op.out, s) + i, get(at<T>(op.x, s) + i) * factor);
}

}  // namespace

const Kernel take_rows_kernel[2] = {per_row<take_rows<bf16>>, per_row<take_rows<float>>};
const Kernel join_columns_kernel[2] = {per_row<join_columns<bf16>>, per_row<join_columns<float>>};
const Kernel add_kernel[2] = {per_row<add<bf16>>, per_row<add<float>>};
const Kernel scale_kernel[2] = {per_row<scale<bf16>>, per_row<scale<float>>};
const Kernel scale_rows_kernel[2] = {per_row<scale_rows<bf16>>, per_row<scale_rows<float>>};
const Kernel clamp_kernel[2] = {per_row<clamp<bf16>>, per_row<clamp<float>>};
const Kernel softcap_kernel[2] = {per_row<softcap<bf16>>, per_row<softcap<float>>};
