// Normalisation of a row after adding it to the residual stream.
// buf: residual f32 or none (updated), x (added to the residual, or normed itself without one) or none, weight f32, out,
// bias f32 or none, what x is added to instead (then the residual is only written) or none, and see levels.h; n: cols; f: eps. The weight carries any offset and is zero in the padding.
#include "../matmul/levels.h"
#include <cmath>

namespace {

template <class T> vf total(const Op& op, const Step& s, int64_t r, int i) {  // columns i .. i + 16 of the sum, stored
    int64_t row = r * stride(op.n[0]) + i;
    float* residual = at<float>(op, s, 0);
    const T* x = at<T>(op, s, 1);
    if (!residual) return get(x + row);
    const T* other = at<T>(op, s, 5);
    vf v = other ? get(other + row) : load<vf>(residual + row);
    if (x) store(residual + row, v = v + get(x + row));
    return v;
}

template <class T> vf again(const Op& op, const Step& s, int64_t r, int i) {
    int64_t row = r * stride(op.n[0]) + i;
    return op.buf[0] < 0 ? get(at<T>(op, s, 1) + row) : load<vf>(at<float>(op, s, 0) + row);
}

template <class T> void rms_norm(const Op& op, const Step& s, int64_t r) {
    int64_t padded = stride(op.n[0]);
    const float* weight = at<float>(op, s, 2);
    T* out = at<T>(op, s, 3) + r * padded;
    vf squares{};
    for (int i = 0; i < padded; i += LANES) {
        vf v = total<T>(op, s, r, i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(op.n[0]) + op.f[0]));
    for (int i = 0; i < padded; i += LANES) put(out + i, again<T>(op, s, r, i) * scale * load<vf>(weight + i));
    quantise_row(op, s, r, out);
}

template <class T> void layer_norm(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0];
    int64_t padded = stride(cols);
    const float *weight = at<float>(op, s, 2), *bias = at<float>(op, s, 4);
    T* out = at<T>(op, s, 3) + r * padded;
    vf totals{}, squares{};
    for (int i = 0; i < padded; i += LANES) totals += total<T>(op, s, r, i);
    float mean = sum(totals) / float(cols);
    for (int i = 0; i < padded; i += LANES) {
        vf v = first(again<T>(op, s, r, i) - mean, cols - i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(cols) + op.f[0]));
    for (int i = 0; i < padded; i += LANES) {
        vf v = (again<T>(op, s, r, i) - mean) * scale * load<vf>(weight + i);
        put(out + i, bias ? v + load<vf>(bias + i) : v);
    }
    quantise_row(op, s, r, out);
}

}  // namespace

const Kernel rms_norm_kernel[2] = {{row_tiles, by_rows<rms_norm<bf16>>}, {row_tiles, by_rows<rms_norm<float>>}};
const Kernel layer_norm_kernel[2] = {{row_tiles, by_rows<layer_norm<bf16>>}, {row_tiles, by_rows<layer_norm<float>>}};
