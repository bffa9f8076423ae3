// Selective state spaces: per channel, h = exp(dt A) h + dt x B; the output is C . h + D x. A is
// negative.
#include "scan.h"

namespace {

constexpr int SPACE_CHANNELS = 32;

int space_tiles(const SpaceScan& op, const Step& s) {
    return s.run->seqs * ceil_div(op.width * op.num_heads, SPACE_CHANNELS);
}

void negative_exp(float* x, int n) {  // of whole vectors
    for (int i = 0; i < n; i += LANES) store(x + i, -exp(load<vf>(x + i)));
}

// dt of some heads in a row.
template <class T>
void time_steps(const SpaceScan& op, const Step& s, int64_t row, int first, int count, float* dt) {
    if (!op.dt.present()) {
        std::fill_n(dt, count, 1.f);
        return;
    }
    const int64_t place = row * op.dt_stride + op.dt_first + first;
    if (!op.raw) return scans::widen(at<float>(op.dt, s) + place, dt, count);
    const T* rows = at<T>(op.dt, s) + place;
    const float* bias = at(op.dt_bias, s);
    for (int i = 0; i < count; i += LANES) {
        vf x = scans::get(rows + i, count - i);
        if (bias) x += scans::get(bias + first + i, count - i);
        store(dt + i, min(max(scans::softplus(x), splat(op.dt_low)), splat(op.dt_high)));
    }
}

template <class T> void space(const SpaceScan& op, const Step& s, int t, void* scratch) {
    const int width = op.width, heads = op.num_heads, states = op.states, group = heads / op.groups;
    const int channels = width * heads;
    const int blocks = ceil_div(channels, SPACE_CHANNELS), padded = round_up(states, LANES);
    const int first = t % blocks * SPACE_CHANNELS;
    const int count = std::min(SPACE_CHANNELS, channels - first);
    const scans::Span span = scans::span(*s.run, t / blocks);
    if (!span.rows) return;
    const float *a = at(op.a, s), *d = at(op.d, s);
    const int first_head = first / width, num_heads = (first + count - 1) / width - first_head + 1;
    float *state = at(op.state, s) + int64_t(first) * states, *out = at(op.out, s) + first;
    float *held = static_cast<float*>(scratch), *decay = held + SPACE_CHANNELS * padded;
    float *b = decay + SPACE_CHANNELS * padded, *c = b + padded;
    float *dt = c + padded, *by_head = dt + SPACE_CHANNELS;  // of the heads of this tile
    // the last tile pads rows with zeros
    const int end = first + count == channels ? op.out_stride - first : count;
    const int64_t slot = int64_t(channels) * states;
    for (int i = 0; i < count; i++) {
        scans::widen(state + span.slot * slot + i * states, held + i * padded, states);
        if (op.a_by_state) {
            scans::widen(a + int64_t(first + i) / width * op.a_stride, decay + i * padded, states);
            if (op.raw) negative_exp(decay + i * padded, padded);
        }
    }
    if (!op.a_by_state) {
        scans::widen(a + first_head, by_head, num_heads);
        if (op.raw) negative_exp(by_head, num_heads);
    }
    scans::walk(
        *s.run, span,
        [&](int row) {
            const int64_t r = row;
            const T* x = at<T>(op.x, s) + r * op.x_stride + op.x_first + first;
            const T* b_row = at<T>(op.b, s) + r * op.b_stride + op.b_first;
            const T* c_row = at<T>(op.c, s) + r * op.c_stride + op.c_first;
            time_steps<T>(op, s, r, first_head, num_heads, dt);
            float step = 0;
            int head = -1, of = -1;
            float keep = 0;
            for (int i = 0; i < count; i++) {
                if (int h = (first + i) / width; h != head) {
                    head = h;
                    step = dt[head - first_head];
                    if (!op.a_by_state) keep = exp1(step * by_head[head - first_head]);
                    if (head / group != of) {
                        of = head / group;
                        scans::widen(b_row + of * states, b, states);
                        scans::widen(c_row + of * states, c, states);
                    }
                }
                const float in = scans::number(x[i]);
                const vf take = splat(step * in), steps = splat(step), same = splat(keep);
                float* h = held + i * padded;
                vf total{};
                for (int n = 0; n < padded; n += LANES) {
                    vf by_state = load<vf>(decay + i * padded + n);
                    vf factor = op.a_by_state ? exp(steps * by_state) : same;
                    vf now = fma(take, load<vf>(b + n), load<vf>(h + n) * factor);
                    store(h + n, now);
                    total = fma(now, load<vf>(c + n), total);
                }
                out[r * op.out_stride + i] = std::fma(d[head], in, sum(total));
            }
            for (int i = count; i < end; i++) out[r * op.out_stride + i] = 0;
        },
        [&](int to) {
            for (int i = 0; i < count; i++)
                std::copy_n(held + i * padded, states, state + to * slot + i * states);
        });
}

}  // namespace

const Kernel space_scan_kernel[2] = {tiled<space_tiles, space<bf16>>,
                                     tiled<space_tiles, space<float>>};
