// RWKV-7: each head keeps a matrix with a row per key column; rows decay, and the value stored for
// a key is removed before the new value is added.
#include "scan.h"

namespace {

constexpr int WKV7_COLS = 2 * LANES, WKV7_MAX_WIDTH = 256;
constexpr float WKV7_SLOWEST = -.60653066f;  // -exp(-1/2), of the logarithm of decay

int wkv7_tiles(const Wkv7Scan& op, const Step& s) {
    return s.run->seqs * op.num_heads * ceil_div(op.width, WKV7_COLS);
}

// Values that a head derives from its columns of a row, each as many floats as there are columns.
struct Wkv7Row {
    alignas(64) float query[WKV7_MAX_WIDTH], key[WKV7_MAX_WIDTH], decay[WKV7_MAX_WIDTH];
    alignas(64) float removed[WKV7_MAX_WIDTH], rated[WKV7_MAX_WIDTH];
};

// Columns of a head in a row of one of the inputs.
template <class T> const T* wkv7_at(const Wkv7Inputs& in, Buf<void> x, const Step& s, int64_t r) {
    return at<T>(x, s) + r * stride(in.cols);
}

template <class T>
void wkv7_keys(const Wkv7Inputs& in, const Step& s, int64_t r, int first, int width, Wkv7Row& row) {
    for (int i = 0; i < width; i += LANES) {
        const int left = width - i;
        const vf rate = sigmoid(scans::get(wkv7_at<T>(in, in.rate, s, r) + first + i, left));
        const vf key = scans::get(wkv7_at<T>(in, in.key, s, r) + first + i, left);
        const vf share = scans::get(at(in.k_a, s) + first + i, left);
        store(row.query + i, scans::get(wkv7_at<T>(in, in.query, s, r) + first + i, left));
        store(row.key + i, key * (1.f + (rate - 1.f) * share));
        store(row.rated + i, rate);
        store(row.removed + i, key);
    }
}

template <class T> void wkv7(const Wkv7Scan& op, const Step& s, int t, void* scratch) {
    const int width = op.width, heads = op.num_heads, blocks = ceil_div(width, WKV7_COLS);
    const int head = t / blocks % heads, first = t % blocks * WKV7_COLS, begin = head * width;
    const int cols = std::min(WKV7_COLS, width - first);
    const scans::Span span = scans::span(*s.run, t / blocks / heads);
    if (!span.rows) return;
    const int64_t size = int64_t(width) * width, slot = heads * size;
    float *states = at(op.state, s) + head * size + first, *held = static_cast<float*>(scratch);
    for (int key = 0; key < width; key++)
        scans::widen(states + span.slot * slot + int64_t(key) * width, held + key * WKV7_COLS,
                     cols);
    const bool last = head == heads - 1 && first + cols == width;
    Wkv7Row row;
    scans::walk(
        *s.run, span,
        [&](int r) {
            wkv7_keys<T>(op.inputs, s, r, begin, width, row);
            const T* fades = wkv7_at<T>(op.inputs, op.decay, s, r) + begin;
            vf squares{};
            for (int i = 0; i < width; i += LANES) {
                const int left = width - i;
                vf removed =
                    load<vf>(row.removed + i) * scans::get(at(op.k_k, s) + begin + i, left);
                squares = fma(removed, removed, squares);
                store(row.removed + i, removed);
                store(row.decay + i, exp(sigmoid(scans::get(fades + i, left)) * WKV7_SLOWEST));
            }
            const float length = std::max(std::sqrt(sum(squares)), 1e-12f);
            for (int i = 0; i < width; i += LANES) {
                vf removed = load<vf>(row.removed + i) / length;
                store(row.rated + i, load<vf>(row.rated + i) * removed);
                store(row.removed + i, removed);
            }
            const T* value = wkv7_at<T>(op.inputs, op.inputs.value, s, r) + begin + first;
            float* out = at(op.out, s) + int64_t(r) * stride(op.inputs.cols) + begin + first;
            for (int i = 0; i < cols; i += LANES) {
                const vf v = scans::get(value + i, cols - i);
                vf known{}, recalled{};
                for (int key = 0; key < width; key++)
                    known =
                        fma(splat(row.removed[key]), load<vf>(held + key * WKV7_COLS + i), known);
                for (int key = 0; key < width; key++) {
                    float* at = held + key * WKV7_COLS + i;
                    vf matrix = load<vf>(at) * row.decay[key] - known * row.rated[key];
                    matrix = fma(splat(row.key[key]), v, matrix);
                    store(at, matrix);
                    recalled = fma(splat(row.query[key]), matrix, recalled);
                }
                scans::put(out + i, recalled, cols - i);
            }
            if (last) std::fill_n(out + cols, stride(op.inputs.cols) - op.inputs.cols, 0.f);
        },
        [&](int to) {
            for (int key = 0; key < width; key++)
                std::copy_n(held + key * WKV7_COLS, cols,
                            states + to * slot + int64_t(key) * width);
        });
}

// Norms the output of each head, adds the value of the row, and gates both.
template <class T> void wkv7_out(const Wkv7Out& op, const Step& s, int64_t r) {
    const int width = op.width;
    Wkv7Row row;
    T* out = at<T>(op.out, s) + r * stride(op.inputs.cols);
    for (int begin = 0; begin < op.inputs.cols; begin += width) {
        const float* recalled = at(op.recalled, s) + r * stride(op.inputs.cols) + begin;
        wkv7_keys<T>(op.inputs, s, r, begin, width, row);
        vf direct{}, total{}, spread{};
        for (int i = 0; i < width; i += LANES) {
            const vf share = scans::get(at(op.r_k, s) + begin + i, width - i);
            direct += load<vf>(row.query + i) * load<vf>(row.key + i) * share;
            total += scans::get(recalled + i, width - i);
        }
        const float own = sum(direct), mean = sum(total) / float(width);
        for (int i = 0; i < width; i += LANES) {
            const vf v = first(scans::get(recalled + i, width - i) - mean, width - i);
            spread = fma(v, v, spread);
        }
        const float scale = 1.f / std::sqrt(sum(spread) / float(width) + op.eps);
        for (int i = 0; i < width; i += LANES) {
            const int left = width - i, at_col = begin + i;
            vf v = (scans::get(recalled + i, left) - mean) * scale *
                   scans::get(at(op.weight, s) + at_col, left);
            v += scans::get(at(op.bias, s) + at_col, left);
            v += scans::get(wkv7_at<T>(op.inputs, op.inputs.value, s, r) + at_col, left) * own;
            const vf gate = scans::get(wkv7_at<T>(op.inputs, op.gate, s, r) + at_col, left);
            scans::put(out + at_col, scans::rounded<T>(v) * gate, left);
        }
    }
    std::fill(out + op.inputs.cols, out + stride(op.inputs.cols), T(0));
}

}  // namespace

const Kernel wkv7_scan_kernel[2] = {tiled<wkv7_tiles, wkv7<bf16>>, tiled<wkv7_tiles, wkv7<float>>};
const Kernel wkv7_out_kernel[2] = {per_row<wkv7_out<bf16>>, per_row<wkv7_out<float>>};
