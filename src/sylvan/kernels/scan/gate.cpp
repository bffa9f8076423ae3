// Rows times a function of a gate, with a norm of their parts before or after it.
#include "scan.h"

namespace {

int gate_tiles(const GateRows& op, const Step& s) { return row_tiles(op, s); }

struct GatedRow {
    const GateRows& op;
    const Step& s;
    int64_t r;
    int width;  // columns of a part

    template <class T> vf y(int i, int n) const {
        const int64_t place = r * stride(op.cols) + i;
        if (!op.y_f32) return scans::get(at<T>(op.y, s) + place, n);
        return scans::get(at<float>(op.y, s) + place, n);
    }
    template <class T> vf gate(int i, int n) const {
        vf x = scans::get(at<T>(op.gate, s) + r * op.gate_stride + op.gate_first + i, n);
        return op.function == Function::SILU ? x * sigmoid(x) : sigmoid(x);
    }
};

// One part: columns from `begin` on. `scratch` is for the numbers that are normed.
template <class T> void gate_part(const GatedRow& row, int begin, float* scratch, T* out) {
    const GateRows& op = row.op;
    const float *weight = at(op.weight, row.s), *bias = at(op.bias, row.s);
    vf squares{};
    for (int i = 0; i < row.width; i += LANES) {
        const int left = row.width - i;
        vf v = row.y<T>(begin + i, left);
        if (op.norm == GateNorm::BEFORE)
            v = scans::rounded<T>(v);
        else if (op.norm != GateNorm::LAYER)
            v *= row.gate<T>(begin + i, left);
        squares = fma(v, v, squares);
        store(scratch + i, v);
    }
    float scale = 1, mean = 0;
    if (op.norm == GateNorm::LAYER) {
        vf total{}, spread{};
        for (int i = 0; i < row.width; i += LANES) total += load<vf>(scratch + i);
        mean = sum(total) / float(row.width);
        for (int i = 0; i < row.width; i += LANES) {
            vf v = ::first(load<vf>(scratch + i) - mean, row.width - i);
            spread = fma(v, v, spread);
        }
        squares = spread;
    }
    if (op.norm != GateNorm::NONE)
        scale = 1.f / std::sqrt(sum(squares) / float(row.width) + op.eps);
    for (int i = 0; i < row.width; i += LANES) {
        const int left = row.width - i;
        vf v = (load<vf>(scratch + i) - mean) * scale;
        if (op.norm == GateNorm::BEFORE) {
            v = scans::rounded<T>(v * scans::get(weight + i, left));
            v *= row.gate<T>(begin + i, left);
        }
        if (op.norm == GateNorm::LAYER) {
            v *= scans::get(weight + begin + i, left);
            if (bias) v += scans::get(bias + begin + i, left);
            v *= row.gate<T>(begin + i, left);
        }
        if (op.norm == GateNorm::AFTER)
            v = scans::rounded<T>(v) * scans::get(weight + begin + i, left);
        scans::put(out + begin + i, v, left);
    }
}

template <class T> void gate_rows(const GateRows& op, const Step& s, int t, void* scratch) {
    const int end = std::min((t + 1) * ROW_TILE, rows(op, s));
    for (int64_t r = t * ROW_TILE; r < end; r++) {
        T* out = at<T>(op.out, s) + r * stride(op.cols);
        const GatedRow row{op, s, r, op.cols / op.parts};
        for (int part = 0; part < op.parts; part++)
            gate_part<T>(row, part * row.width, static_cast<float*>(scratch), out);
        std::fill(out + op.cols, out + stride(op.cols), T(0));
    }
}

}  // namespace

const Kernel gate_rows_kernel[2] = {tiled<gate_tiles, gate_rows<bf16>>,
                                    tiled<gate_tiles, gate_rows<float>>};
