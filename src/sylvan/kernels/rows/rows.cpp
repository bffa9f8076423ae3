// Whole rows: choosing them, and arithmetic on them. buf: x, out (add: a, b, out); n: cols; f: scalar.
#include "../native/kernel.h"

namespace {

template <class T> void take_rows(const Op& op, const Step& s, int64_t r) {
    int64_t width = stride(op.n[0]);
    memcpy(at<T>(op, s, 1) + r * width, at<T>(op, s, 0) + s.run->out_rows[r] * width, width * sizeof(T));
}

// n[1], n[2] of add: whether a (and so the result), and b, are float32 beside rows of type T.
template <class T> vf read(const Op& op, const Step& s, int buf, bool wide, int64_t i) {
    return wide ? get(at<float>(op, s, buf) + i) : get(at<T>(op, s, buf) + i);
}
template <class T> void write(const Op& op, const Step& s, int buf, bool wide, int64_t i, vf v) {
    if (wide) put(at<float>(op, s, buf) + i, v);
    else put(at<T>(op, s, buf) + i, v);
}

template <class T> void add(const Op& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.n[0]), end = i + stride(op.n[0]); i < end; i += LANES)
        write<T>(op, s, 2, op.n[1], i, read<T>(op, s, 0, op.n[1], i) + read<T>(op, s, 1, op.n[2], i) * op.f[0]);
}

template <class T> void scale(const Op& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.n[0]), end = i + stride(op.n[0]); i < end; i += LANES)
        write<T>(op, s, 1, op.n[1], i, read<T>(op, s, 0, op.n[1], i) * op.f[0]);
}

template <class T> void softcap(const Op& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.n[0]), end = i + stride(op.n[0]); i < end; i += LANES)
        write<T>(op, s, 1, op.n[1], i, tanh(read<T>(op, s, 0, op.n[1], i) / op.f[0]) * op.f[0]);
}

// buf: x, factors (column 0 of each row counts), out
template <class T> void scale_rows(const Op& op, const Step& s, int64_t r) {
    vf factor = splat(get(at<T>(op, s, 1) + r * stride(1))[0]);
    for (int64_t i = r * stride(op.n[0]), end = i + stride(op.n[0]); i < end; i += LANES)
        put(at<T>(op, s, 2) + i, get(at<T>(op, s, 0) + i) * factor);
}

}  // namespace

const Kernel take_rows_kernel[2] = {{row_tiles, by_rows<take_rows<bf16>>}, {row_tiles, by_rows<take_rows<float>>}};
const Kernel add_kernel[2] = {{row_tiles, by_rows<add<bf16>>}, {row_tiles, by_rows<add<float>>}};
const Kernel scale_kernel[2] = {{row_tiles, by_rows<scale<bf16>>}, {row_tiles, by_rows<scale<float>>}};
const Kernel scale_rows_kernel[2] = {{row_tiles, by_rows<scale_rows<bf16>>}, {row_tiles, by_rows<scale_rows<float>>}};
const Kernel softcap_kernel[2] = {{row_tiles, by_rows<softcap<bf16>>}, {row_tiles, by_rows<softcap<float>>}};
