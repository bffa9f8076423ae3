// buf: gate|up (or x), out, and see levels.h; n: cols of the result, function, whether the gated form is GPT-OSS's; f: its alpha and limit
#include "../matmul/levels.h"

namespace {

// Calls f with the function of one vector.
template <class F> void by_function(int function, F&& f) {
    switch (function) {
        case SILU: return f([](vf x) { return x * sigmoid(x); });
        case GELU: return f([](vf x) { return .5f * x * (1.f + erf(x * .70710678f)); });
        case GELU_TANH: return f([](vf x) { return .5f * x * (1.f + tanh(.79788456f * fma(x * x * x, splat(.044715f), x))); });
        case RELU: return f([](vf x) { return max(x, vf{}); });
        case RELU2: return f([](vf x) { return max(x, vf{}) * max(x, vf{}); });
        case SIGMOID: return f([](vf x) { return 1.f / (exp(-x) + 1.f); });
        default: return f([](vf x) { return tanh(x); });
    }
}

// out[i ..] = f(i) for all columns, and zeros in the padding.
template <class T, class F> void each(T* out, int cols, F&& f) {
    int i = 0;
    for (; i + LANES <= cols; i += LANES) put(out + i, f(i));
    for (; i < stride(cols); i += LANES) put(out + i, first(f(i), cols - i));
}

template <class T> void glu(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0];
    const T *gate = at<T>(op, s, 0) + r * stride(2 * cols), *up = gate + cols;
    T* out = at<T>(op, s, 1) + r * stride(cols);
    if (op.n[2]) {  // both halves clamped, up plus one, the sigmoid of alpha times gate
        vf limit = splat(op.f[1]), alpha = splat(op.f[0]);
        each(out, cols, [=](int i) {
            vf g = min(get(gate + i), limit), u = min(max(get(up + i), -limit), limit);
            return (u + 1.f) * g * sigmoid(g * alpha);
        });
    } else by_function(op.n[1], [=](auto f) { each(out, cols, [=](int i) { return f(get(gate + i)) * get(up + i); }); });
    quantise_row(op, s, r, out);
}

template <class T> void activation(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0];
    const T* x = at<T>(op, s, 0) + r * stride(cols);
    T* out = at<T>(op, s, 1) + r * stride(cols);
    by_function(op.n[1], [=](auto f) { each(out, cols, [=](int i) { return f(get(x + i)); }); });
    quantise_row(op, s, r, out);
}

}  // namespace

const Kernel glu_kernel[2] = {{row_tiles, by_rows<glu<bf16>>}, {row_tiles, by_rows<glu<float>>}};
const Kernel activation_kernel[2] = {{row_tiles, by_rows<activation<bf16>>}, {row_tiles, by_rows<activation<float>>}};
