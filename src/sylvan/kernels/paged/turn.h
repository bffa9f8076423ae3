// Norms and rotary positions of heads.
#pragma once
#include "pages.h"
#include <cmath>

struct Norm {  // of heads: `weight` null means none; over all heads at once where `scale` is set
    const float* weight;
    float eps, scale;
};

struct Turn {
    const float *cos, *sin;
    int dim;
    bool interleaved;
};

template <class T> static inline float inverse_rms(const T* row, int cols, float eps) {
    vf squares{};
    for (int i = 0; i < cols; i += LANES) {
        vf v = first(get(row + i), cols - i);
        squares = fma(v, v, squares);
    }
    return 1.f / std::sqrt(sum(squares) / float(cols) + eps);
}

static inline void normalise(float* head, int dim, const Norm& norm) {
    vf scale = splat(norm.scale != 0 ? norm.scale : inverse_rms(head, dim, norm.eps));
    for (int i = 0; i < dim; i += LANES) store(head + i, load<vf>(head + i) * scale * load<vf>(norm.weight + i));
}

static inline void rotate(float* head, const Turn& turn) {
    float turned[MAX_HEAD + LANES];
    int half = turn.dim / 2;
    if (turn.interleaved)
        for (int i = 0; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            turned[2 * i] = a * turn.cos[i] - b * turn.sin[i];
            turned[2 * i + 1] = b * turn.cos[i] + a * turn.sin[i];
        }
    else
        for (int i = 0; i < half; i += LANES) {
            vf a = load<vf>(head + i), b = load<vf>(head + half + i), c = load<vf>(turn.cos + i), z = load<vf>(turn.sin + i);
            vf x = fma(a, c, -(b * z)), y = fma(b, c, a * z);
            if (i + LANES <= half) {
                store(turned + i, x), store(turned + half + i, y);
                continue;
            }
            size_t bytes = (half - i) * sizeof(float);
            memcpy(turned + i, &x, bytes), memcpy(turned + half + i, &y, bytes);
        }
    int i = 0;
    for (; i + LANES <= turn.dim; i += LANES) store(head + i, load<vf>(turned + i));
    for (; i < turn.dim; i++) head[i] = turned[i];
}

// Reads a head, works on it in float32 and rounds once; `out` is padded with zeros to a multiple of 32.
template <class T> static inline void prepare(const T* in, T* out, int dim, const Norm& norm, const Turn& turn) {
    alignas(64) float head[MAX_HEAD + 2 * KEY_PAD];
    int padded = round_up(dim, KEY_PAD);
    for (int i = 0; i < padded; i += LANES) store(head + i, first(i < dim ? get(in + i) : vf{}, dim - i));
    if (norm.weight) normalise(head, dim, norm);
    if (turn.dim) rotate(head, turn);
    for (int i = 0; i < padded; i += LANES) put(out + i, first(load<vf>(head + i), dim - i));
}
