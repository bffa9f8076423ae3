// Normalisation of a row after adding it to the residual stream.
// buf: residual f32 or none (updated), x (added to the residual, or normed itself without one) or none, weight f32, out,
// bias f32 or none, what x is added to instead (then the residual is only written) or none, and see levels.h; n: cols; f: eps. The weight carries any offset and is zero in the padding.
#include "../matmul/levels.h"
#include <cmath>

namespace {

template <class T> struct Stream {  // the row that is normed
    float* residual;
    const T *x, *other;

    Stream(const Op& op, const Step& s, int64_t r)
        : residual(at<float>(op, s, 0)), x(at<T>(op, s, 1)), other(at<T>(op, s, 5)) {
        int64_t row = r * stride(op.n[0]);
        if (residual) residual += row;
        if (x) x += row;
        if (other) other += row;
    }
    vf sum(int i) const {  // columns i .. i + 16, stored
        if (!residual) return get(x + i);
        vf v = other ? get(other + i) : load<vf>(residual + i);
        if (x) store(residual + i, v = v + get(x + i));
        return v;
    }
    vf again(int i) const { return residual ? load<vf>(residual + i) : get(x + i); }
};

template <class T> void rms_norm(const Op& op, const Step& s, int64_t r) {
    int padded = int(stride(op.n[0]));
    const float* weight = at<float>(op, s, 2);
    T* out = at<T>(op, s, 3) + r * padded;
    const Stream<T> stream(op, s, r);
    vf squares{};
    for (int i = 0; i < padded; i += LANES) {
        vf v = stream.sum(i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(op.n[0]) + op.f[0]));
    for (int i = 0; i < padded; i += LANES) put(out + i, stream.again(i) * scale * load<vf>(weight + i));
    quantise_row(op, s, r, out);
}

template <class T> void layer_norm(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0], padded = int(stride(cols));
    const float *weight = at<float>(op, s, 2), *bias = at<float>(op, s, 4);
    T* out = at<T>(op, s, 3) + r * padded;
    const Stream<T> stream(op, s, r);
    vf totals{}, squares{};
    for (int i = 0; i < padded; i += LANES) totals += stream.sum(i);
    float mean = sum(totals) / float(cols);
    for (int i = 0; i < padded; i += LANES) {
        vf v = first(stream.again(i) - mean, cols - i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(cols) + op.f[0]));
    for (int i = 0; i < padded; i += LANES) {
        vf v = (stream.again(i) - mean) * scale * load<vf>(weight + i);
        put(out + i, bias ? v + load<vf>(bias + i) : v);
    }
    quantise_row(op, s, r, out);
}

}  // namespace

const Kernel rms_norm_kernel[2] = {{row_tiles, by_rows<rms_norm<bf16>>}, {row_tiles, by_rows<rms_norm<float>>}};
const Kernel layer_norm_kernel[2] = {{row_tiles, by_rows<layer_norm<bf16>>}, {row_tiles, by_rows<layer_norm<float>>}};
