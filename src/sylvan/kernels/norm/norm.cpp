// Normalisation of a row after adding it to the residual stream.
// The weight carries any offset and is zero in the padding.
#include "../matmul/levels.h"
#include <cmath>

namespace {

template <class T> struct Stream {  // the row that is normed
    float* residual;
    const T *x, *base;

    Stream(const ResidualStream& stream, int cols, const Step& s, int64_t r)
        : residual(at(stream.residual, s)), x(at<T>(stream.x, s)), base(at<T>(stream.base, s)) {
        int64_t row = r * stride(cols);
        if (residual) residual += row;
        if (x) x += row;
        if (base) base += row;
    }
    vf sum(int i) const {  // columns i .. i + 16, stored
        if (!residual) return get(x + i);
        vf v = base ? get(base + i) : load<vf>(residual + i);
        if (x) store(residual + i, v = v + get(x + i));
        return v;
    }
    vf again(int i) const { return residual ? load<vf>(residual + i) : get(x + i); }
};

template <class T> void rms_norm(const RmsNorm& op, const Step& s, int64_t r) {
    int padded = int(stride(op.cols));
    const float* weight = at(op.weight, s);
    T* out = at<T>(op.out, s) + r * padded;
    const Stream<T> stream(op.stream, op.cols, s, r);
    vf squares{};
    for (int i = 0; i < padded; i += LANES) {
        vf v = stream.sum(i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(op.cols) + op.eps));
    for (int i = 0; i < padded; i += LANES)
        put(out + i, stream.again(i) * scale * load<vf>(weight + i));
    quantise_row(op.quantised, op.cols, s, r, out);
}

template <class T> void layer_norm(const LayerNorm& op, const Step& s, int64_t r) {
    int cols = op.cols, padded = int(stride(cols));
    const float *weight = at(op.weight, s), *bias = at(op.bias, s);
    T* out = at<T>(op.out, s) + r * padded;
    const Stream<T> stream(op.stream, op.cols, s, r);
    vf totals{}, squares{};
    for (int i = 0; i < padded; i += LANES) totals += stream.sum(i);
    float mean = sum(totals) / float(cols);
    for (int i = 0; i < padded; i += LANES) {
        vf v = first(stream.again(i) - mean, cols - i);
        squares = fma(v, v, squares);
    }
    vf scale = splat(1.f / std::sqrt(sum(squares) / float(cols) + op.eps));
    for (int i = 0; i < padded; i += LANES) {
        vf v = (stream.again(i) - mean) * scale * load<vf>(weight + i);
        put(out + i, bias ? v + load<vf>(bias + i) : v);
    }
    quantise_row(op.quantised, op.cols, s, r, out);
}

}  // namespace

const Kernel rms_norm_kernel[2] = {per_row<rms_norm<bf16>>, per_row<rms_norm<float>>};
const Kernel layer_norm_kernel[2] = {per_row<layer_norm<bf16>>, per_row<layer_norm<float>>};
