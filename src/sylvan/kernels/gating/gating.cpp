// buf: gate|up (or x), out, and see levels.h; n: cols of the result, function, whether the gated form is GPT-OSS's; f: its alpha and limit
#include "../matmul/levels.h"

namespace {

vf apply(int function, vf x) {
    switch (function) {
        case SILU: return x / (exp(-x) + 1.f);
        case GELU: return .5f * x * (1.f + erf(x * .70710678f));
        case GELU_TANH: return .5f * x * (1.f + tanh(.79788456f * fma(x * x * x, splat(.044715f), x)));
        case RELU: return max(x, vf{});
        case RELU2: return max(x, vf{}) * max(x, vf{});
        case SIGMOID: return 1.f / (exp(-x) + 1.f);
        default: return tanh(x);
    }
}

// Both halves clamped, up plus one, the sigmoid of alpha times gate.
template <class T> void clamped(const T* gate, const T* up, T* out, int cols, float alpha, vf limit) {
    for (int i = 0; i < stride(cols); i += LANES) {
        vf g = min(get(gate + i), limit), u = min(max(get(up + i), -limit), limit);
        put(out + i, first((u + 1.f) * g / (exp(g * -alpha) + 1.f), cols - i));
    }
}

template <class T> void glu(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0];
    const T *gate = at<T>(op, s, 0) + r * stride(2 * cols), *up = gate + cols;
    T* out = at<T>(op, s, 1) + r * stride(cols);
    if (op.n[2]) clamped(gate, up, out, cols, op.f[0], splat(op.f[1]));
    else
        for (int i = 0; i < stride(cols); i += LANES) put(out + i, first(apply(op.n[1], get(gate + i)) * get(up + i), cols - i));
    quantise_row(op, s, r, out);
}

template <class T> void activation(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0];
    const T* x = at<T>(op, s, 0) + r * stride(cols);
    T* out = at<T>(op, s, 1) + r * stride(cols);
    for (int i = 0; i < stride(cols); i += LANES) put(out + i, first(apply(op.n[1], get(x + i)), cols - i));
    quantise_row(op, s, r, out);
}

}  // namespace

const Kernel glu_kernel[2] = {{row_tiles, by_rows<glu<bf16>>}, {row_tiles, by_rows<glu<float>>}};
const Kernel activation_kernel[2] = {{row_tiles, by_rows<activation<bf16>>}, {row_tiles, by_rows<activation<float>>}};
