// Matrix memory of xLSTM. The matrix, the sum of keys and the input are stored relative to
// exp(scale), where scale is the largest exponent so far.
#include "scan.h"

namespace {

int mlstm_tiles(const MlstmScan& op, const Step& s) { return s.run->seqs * op.num_heads; }

struct Gates {  // of a row: factors of the old state and of the input
    float kept, fresh, scale;
};

Gates gates(const MlstmScan& op, const Step& s, int64_t row, int head, float scale) {
    const int64_t place = row * op.gate_stride + head;
    const float into = at(op.into, s)[place];
    const float carried = scale - scans::softplus(splat(-at(op.keep, s)[place]))[0];
    const float most = std::max(carried, into);
    return {exp1(carried - most), exp1(into - most), most};
}

template <class T> void mlstm(const MlstmScan& op, const Step& s, int t, void* scratch) {
    const int keys = op.key_dim, values = op.value_dim, heads = op.num_heads, head = t % heads;
    const int wide = round_up(values, LANES), padded = round_up(keys, LANES);
    const scans::Span span = scans::span(*s.run, t / heads);
    if (!span.rows) return;
    const int64_t size = int64_t(keys) * (values + 1) + 1, slot = heads * size;
    float *states = at(op.state, s) + head * size, *out = at(op.out, s) + head * values;
    float *held = static_cast<float*>(scratch), *total = held + int64_t(keys) * wide;
    float *q = total + padded, *k = q + padded, *v = k + padded;
    const int padding = op.out_stride - heads * values;
    const float* from = states + span.slot * slot;
    for (int key = 0; key < keys; key++)
        scans::widen(from + int64_t(key) * values, held + int64_t(key) * wide, values);
    scans::widen(from + int64_t(keys) * values, total, keys);
    float scale = from[size - 1];
    scans::walk(
        *s.run, span,
        [&](int row) {
            const int64_t r = row;
            scans::widen(at<T>(op.q, s) + r * op.q_stride + op.q_first + head * keys, q, keys);
            scans::widen(at<T>(op.k, s) + r * op.k_stride + op.k_first + head * keys, k, keys);
            scans::widen(at<T>(op.v, s) + r * op.v_stride + op.v_first + head * values, v, values);
            const Gates now = gates(op, s, r, head, scale);
            scale = now.scale;
            const float root = 1.f / std::sqrt(float(keys));
            vf seen{};
            for (int i = 0; i < padded; i += LANES) {
                vf query = load<vf>(q + i) * root;
                vf sums = fma(load<vf>(k + i), splat(now.fresh), load<vf>(total + i) * now.kept);
                store(q + i, query);
                store(total + i, sums);
                seen = fma(query, sums, seen);
            }
            const float bound = std::max(std::fabs(sum(seen)), exp1(-scale)) + op.eps;
            for (int i = 0; i < values; i += LANES) {
                const vf value = load<vf>(v + i) * now.fresh;
                vf known{};
                for (int key = 0; key < keys; key++) {
                    float* at = held + int64_t(key) * wide + i;
                    vf matrix = fma(splat(k[key]), value, load<vf>(at) * now.kept);
                    store(at, matrix);
                    known = fma(splat(q[key]), matrix, known);
                }
                scans::put(out + r * op.out_stride + i, known / bound, values - i);
            }
            if (head == heads - 1) std::fill_n(out + r * op.out_stride + values, padding, 0.f);
        },
        [&](int to) {
            float* state = states + to * slot;
            for (int key = 0; key < keys; key++)
                std::copy_n(held + int64_t(key) * wide, values, state + int64_t(key) * values);
            std::copy_n(total, keys, state + int64_t(keys) * values);
            state[size - 1] = scale;
        });
}

}  // namespace

const Kernel mlstm_scan_kernel[2] = {tiled<mlstm_tiles, mlstm<bf16>>,
                                     tiled<mlstm_tiles, mlstm<float>>};
