// Elementwise activations, and gated ones: f(first half of a row) times the second half.
#include "../matmul/levels.h"
#include <cmath>

namespace {

// Calls f with the function of one vector.
template <class F> void by_function(Function function, F&& f) {
    switch (function) {
    case Function::SILU:
        return f([](vf x) { return x * sigmoid(x); });
    case Function::GELU:
        return f([](vf x) { return .5f * x * (1.f + erf(x * .70710678f)); });
    case Function::GELU_TANH:
        return f([](vf x) {
            return .5f * x * (1.f + tanh(.79788456f * fma(x * x * x, splat(.044715f), x)));
        });
    case Function::RELU:
        return f([](vf x) { return max(x, vf{}); });
    case Function::RELU2:
        return f([](vf x) { return max(x, vf{}) * max(x, vf{}); });
    case Function::QUICK_GELU:
        return f([](vf x) { return x * sigmoid(x * 1.702f); });
    case Function::SIGMOID:
        return f([](vf x) { return 1.f / (exp(-x) + 1.f); });
    default:
        return f([](vf x) { return tanh(x); });
    }
}

// out[i ..] = f(i) for all columns, and zeros in the padding.
template <class T, class F> void each(T* out, int cols, F&& f) {
    int i = 0;
    for (; i + LANES <= cols; i += LANES) put(out + i, f(i));
    for (; i < stride(cols); i += LANES) put(out + i, first(f(i), cols - i));
}

template <class T> void glu(const Glu& op, const Step& s, int64_t r) {
    if (const int32_t* groups = at(op.groups, s); groups && r >= grouped_rows(groups)) return;
    int cols = op.cols;
    const T *gate = at<T>(op.gate_up, s) + r * stride(2 * cols), *up = gate + cols;
    T* out = at<T>(op.out, s) + r * stride(cols);
    vf limit = splat(op.limit), alpha = splat(op.alpha);
    auto within = [=](const T* x) { return min(max(get(x), -limit), limit); };
    if (op.clamp == ClampForm::GPT_OSS)
        each(out, cols, [=](int i) {
            vf g = min(get(gate + i), limit);
            return (within(up + i) + 1.f) * g * sigmoid(g * alpha);
        });
    else
        by_function(op.function, [=](auto f) {
            if (op.clamp == ClampForm::INPUTS)
                each(out, cols,
                     [=](int i) { return f(min(get(gate + i), limit)) * within(up + i); });
            else if (op.clamp == ClampForm::OUTPUTS)
                each(out, cols,
                     [=](int i) { return min(f(get(gate + i)), limit) * within(up + i); });
            else
                each(out, cols, [=](int i) { return f(get(gate + i)) * get(up + i); });
        });
    quantise_row(op.quantised, cols, s, r, out);
}

template <class T> void activation(const Activation& op, const Step& s, int64_t r) {
    int cols = op.cols;
    const T* x = at<T>(op.x, s) + r * stride(cols);
    T* out = at<T>(op.out, s) + r * stride(cols);
    by_function(op.function,
                [=](auto f) { each(out, cols, [=](int i) { return f(get(x + i)); }); });
    quantise_row(op.quantised, cols, s, r, out);
}

// exp(x) - 1 below zero, to 1e-7 of itself: a series where the difference would cancel.
vf expm1(vf x) {
    vf series = splat(1.f / 362880.f);
    for (float term :
         {1.f / 40320, 1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f})
        series = fma(series, x, splat(term));
    return select(x > -.5f, series * x, exp(x) - 1.f);
}

template <class T> void xielu(const Xielu& op, const Step& s, int64_t r) {
    auto softplus = [](float x) { return x > 20 ? x : std::log1p(std::exp(x)); };
    float line = *at(op.beta, s);
    vf beta = splat(line), above = splat(softplus(*at(op.alpha_p, s)));
    vf below = splat(line + softplus(*at(op.alpha_n, s)));
    vf eps = splat(*at(op.eps, s));
    const T* x = at<T>(op.x, s) + r * stride(op.cols);
    T* out = at<T>(op.out, s) + r * stride(op.cols);
    each(out, op.cols, [=](int i) {
        vf v = get(x + i);
        return select(v > 0.f, above * (v * v), (expm1(min(v, eps)) - v) * below) + beta * v;
    });
    quantise_row(op.quantised, op.cols, s, r, out);
}

}  // namespace

const Kernel glu_kernel[2] = {per_row<glu<bf16>>, per_row<glu<float>>};
const Kernel activation_kernel[2] = {per_row<activation<bf16>>, per_row<activation<float>>};
const Kernel xielu_kernel[2] = {per_row<xielu<bf16>>, per_row<xielu<float>>};
