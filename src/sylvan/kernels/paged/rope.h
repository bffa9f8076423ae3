// Norms and rotary positions of heads.
#pragma once
#include "pages.h"
#include <cmath>

struct Norm {  // norm of heads: `weight` null: none; `scale` set: over all heads at once
    const float* weight;
    float eps, scale;
};

struct Rope {
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
    for (int i = 0; i < dim; i += LANES)
        store(head + i, load<vf>(head + i) * scale * load<vf>(norm.weight + i));
}

static inline void rotate(float* head, const Rope& rope) {
    float rotated[MAX_HEAD + LANES];
    int half = rope.dim / 2;
    if (rope.interleaved)
        for (int i = 0; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            rotated[2 * i] = a * rope.cos[i] - b * rope.sin[i];
            rotated[2 * i + 1] = b * rope.cos[i] + a * rope.sin[i];
        }
    else
        for (int i = 0; i < half; i += LANES) {
            vf a = load<vf>(head + i), b = load<vf>(head + half + i), c = load<vf>(rope.cos + i);
            vf z = load<vf>(rope.sin + i);
            vf x = fma(a, c, -(b * z)), y = fma(b, c, a * z);
            if (i + LANES <= half) {
                store(rotated + i, x);
                store(rotated + half + i, y);
                continue;
            }
            size_t bytes = (half - i) * sizeof(float);
            memcpy(rotated + i, &x, bytes);
            memcpy(rotated + half + i, &y, bytes);
        }
    int i = 0;
    for (; i + LANES <= rope.dim; i += LANES) store(head + i, load<vf>(rotated + i));
    for (; i < rope.dim; i++) head[i] = rotated[i];
}

// Reads a head, works on it in float32 and rounds once; `out` is padded with zeros to a multiple
// of 32.
template <class T> static inline void prepare(const T* in, T* out, int dim, const Norm& norm,
                                              const Rope& rope) {
    alignas(64) float head[MAX_HEAD + 2 * KEY_PAD];
    int padded = round_up(dim, KEY_PAD);
    for (int i = 0; i < padded; i += LANES)
        store(head + i, first(i < dim ? get(in + i) : vf{}, dim - i));
    if (norm.weight) normalise(head, dim, norm);
    if (rope.dim) rotate(head, rope);
    for (int i = 0; i < padded; i += LANES) put(out + i, first(load<vf>(head + i), dim - i));
}
