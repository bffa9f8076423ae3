// Residual streams (manifold-constrained hyper-connections): weights of a row, and the sums of
// streams that they give. A row has its streams side by side, in float32; the columns of a stream
// are whole vectors.
#include "../native/kernel.h"
#include <cmath>

namespace {

constexpr int WEIGHT_BLOCK = 4, WEIGHT_ROWS = 8;

void stream_spread(const StreamSpread& op, const Step& s, int64_t r) {
    int cols = op.cols, width = cols * op.num_streams;
    const float* x = at(op.x, s) + r * stride(cols);
    float* out = at(op.out, s) + r * stride(width);
    for (int i = 0; i < op.num_streams; i++) memcpy(out + i * cols, x, cols * sizeof(float));
    for (int64_t d = width; d < stride(width); d++) out[d] = 0;
}

// A tile is a block of outputs of a few rows, which share the rows of the matrix in the cache.
int weight_blocks(const StreamWeights& op) { return ceil_div(op.outputs, WEIGHT_BLOCK); }
int stream_weights_tiles(const StreamWeights& op, const Step& s) {
    return weight_blocks(op) * ceil_div(rows(op, s), WEIGHT_ROWS);
}
void stream_weights(const StreamWeights& op, const Step& s, int t, void*) {
    int begin = t % weight_blocks(op) * WEIGHT_BLOCK, first = t / weight_blocks(op) * WEIGHT_ROWS;
    int count = std::min(WEIGHT_BLOCK, op.outputs - begin);
    const float* w[WEIGHT_BLOCK];  // missing outputs repeat the last one
    for (int o = 0; o < WEIGHT_BLOCK; o++)
        w[o] = at(op.weight, s) + int64_t(begin + std::min(o, count - 1)) * op.weight_stride;
    for (int r = first, end = std::min(first + WEIGHT_ROWS, rows(op, s)); r < end; r++) {
        const float* x = at(op.x, s) + r * stride(op.cols);
        vf acc[WEIGHT_BLOCK] = {};
        for (int i = 0; i < op.cols; i += LANES) {
            vf v = load<vf>(x + i);
            unrolled<WEIGHT_BLOCK>(
                [&](auto o) SYLVAN_INLINE { acc[o] = fma(v, load<vf>(w[o] + i), acc[o]); });
        }
        float* out = at(op.out, s) + r * stride(op.outputs) + begin;
        for (int o = 0; o < count; o++) out[o] = sum(acc[o]);
        if (begin + count == op.outputs)
            for (int64_t o = op.outputs; o < stride(op.outputs); o++) out[o - begin] = 0;
    }
}

float sigmoid1(float x) { return 1.f / (exp1(-x) + 1.f); }

// A matrix of positive numbers, divided by sums of its rows and of its columns in turn.
struct Mixing {
    int count;
    float eps, number[MAX_STREAMS][MAX_STREAMS];

    void divide(float* first, int step) const {
        float total = 0;
        for (int i = 0; i < count; i++) total += first[i * step];
        total += eps;
        for (int i = 0; i < count; i++) first[i * step] /= total;
    }
    void divide_rows() {
        for (int i = 0; i < count; i++) divide(number[i], 1);
    }
    void divide_columns() {
        for (int j = 0; j < count; j++) divide(&number[0][j], MAX_STREAMS);
    }
    void softmax_weights() {
        for (int i = 0; i < count; i++) {
            float* row = number[i];
            float top = *std::max_element(row, row + count), total = 0;
            for (int j = 0; j < count; j++) total += row[j] = exp1(row[j] - top);
            for (int j = 0; j < count; j++) row[j] = row[j] / total + eps;
        }
    }
};

void write_mix(const StreamCollapse& op, const Step& s, int64_t r, const float* weight) {
    int count = op.num_streams, width = count + count * count;
    const float *base = at(op.base, s) + count, *scale = at(op.scale, s);
    float* mix = at(op.mix, s) + r * stride(width);
    for (int i = 0; i < count; i++) mix[i] = 2.f * sigmoid1(weight[count + i] * scale[1] + base[i]);
    weight += 2 * count;
    base += count;
    Mixing mixing{count, op.eps, {}};
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++)
            mixing.number[i][j] = weight[i * count + j] * scale[2] + base[i * count + j];
    mixing.softmax_weights();
    mixing.divide_columns();
    for (int round = 1; round < op.rounds; round++) {
        mixing.divide_rows();
        mixing.divide_columns();
    }
    for (int i = 0; i < count; i++)
        memcpy(mix + count + i * count, mixing.number[i], count * sizeof(float));
    for (int64_t d = width; d < stride(width); d++) mix[d] = 0;
}

void stream_collapse(const StreamCollapse& op, const Step& s, int64_t r) {
    int cols = op.cols, count = op.num_streams, width = cols * count;
    const float *x = at(op.x, s) + r * stride(width), *base = at(op.base, s);
    vf squares{};
    for (int i = 0; i < width; i += LANES) {
        vf v = load<vf>(x + i);
        squares = fma(v, v, squares);
    }
    float inverse = 1.f / std::sqrt(sum(squares) / float(width) + op.norm_eps);
    float weight[MAX_STREAMS * (2 + MAX_STREAMS)], read[MAX_STREAMS];
    for (int i = 0; i < op.outputs; i++)
        weight[i] = at(op.weights, s)[r * stride(op.outputs) + i] * inverse;
    for (int i = 0; i < count; i++)
        read[i] = sigmoid1(weight[i] * at(op.scale, s)[0] + base[i]) + op.eps;
    float* out = at(op.out, s) + r * stride(cols);
    for (int d = 0; d < cols; d += LANES) {
        vf total{};
        for (int i = 0; i < count; i++)
            total = fma(load<vf>(x + i * cols + d), splat(read[i]), total);
        store(out + d, total);
    }
    for (int64_t d = cols; d < stride(cols); d++) out[d] = 0;
    if (op.mix.present()) write_mix(op, s, r, weight);
}

template <class T> void stream_expand(const StreamExpand& op, const Step& s, int64_t r) {
    int cols = op.cols, count = op.num_streams, width = cols * count;
    const float* streams = at(op.streams, s) + r * stride(width);
    const T* x = at<T>(op.x, s) + r * stride(cols);
    const float *write = at(op.mix, s) + r * stride(count + count * count), *mix = write + count;
    float* out = at(op.out, s) + r * stride(width);
    for (int d = 0; d < cols; d += LANES) {
        vf added = get(x + d);
        for (int i = 0; i < count; i++) {
            vf total = added * write[i];
            for (int j = 0; j < count; j++)
                total = fma(load<vf>(streams + j * cols + d), splat(mix[j * count + i]), total);
            store(out + i * cols + d, total);
        }
    }
    for (int64_t d = width; d < stride(width); d++) out[d] = 0;
}

}  // namespace

const Kernel stream_spread_kernel[2] = {per_row<stream_spread>, per_row<stream_spread>};
const Kernel stream_weights_kernel[2] = {tiled<stream_weights_tiles, stream_weights>,
                                         tiled<stream_weights_tiles, stream_weights>};
const Kernel stream_collapse_kernel[2] = {per_row<stream_collapse>, per_row<stream_collapse>};
const Kernel stream_expand_kernel[2] = {per_row<stream_expand<bf16>>,
                                        per_row<stream_expand<float>>};
