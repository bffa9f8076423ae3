// Selective state spaces: per channel, h = exp(dt A) h + dt x B; the output is C . h + D x. A is
// negative.
#include "scan.h"

namespace {

constexpr int SPACE_CHANNELS = 32;

int space_tiles(const SpaceScan& op, const Step& s) {
    return s.run->seqs * ceil_div(op.width * op.num_heads, SPACE_CHANNELS);
}

template <class T> void widen(const T* from, float* to, int n) {  // and zeros up to whole vectors
    for (int i = 0; i < n; i += LANES) store(to + i, scans::get(from + i, n - i));
}

template <class T> void space(const SpaceScan& op, const Step& s, int t, void* scratch) {
    const int width = op.width, heads = op.num_heads, states = op.states, group = heads / op.groups;
    const int channels = width * heads;
    const int blocks = ceil_div(channels, SPACE_CHANNELS), padded = round_up(states, LANES);
    const int first = t % blocks * SPACE_CHANNELS;
    const int count = std::min(SPACE_CHANNELS, channels - first);
    const scans::Span span = scans::span(op.slots, s, t / blocks);
    if (!span.rows) return;
    const float *a = at(op.a, s), *d = at(op.d, s);
    float *state = at(op.state, s) + int64_t(first) * states, *out = at(op.out, s) + first;
    float *held = static_cast<float*>(scratch), *decay = held + SPACE_CHANNELS * padded;
    float *b = decay + SPACE_CHANNELS * padded, *c = b + padded;
    const int64_t slot = int64_t(channels) * states;
    for (int i = 0; i < count; i++) {
        widen(state + span.slot * slot + i * states, held + i * padded, states);
        if (op.a_by_state)
            widen(a + int64_t(first + i) / width * states, decay + i * padded, states);
    }
    scans::walk(
        op.slots, s, span,
        [&](int row) {
            const T* x = at<T>(op.x, s) + int64_t(row) * op.x_stride + first;
            const float* dt = at(op.dt, s) + int64_t(row) * op.dt_stride;
            int head = -1, of = -1;
            float keep = 0;
            for (int i = 0; i < count; i++) {
                if (int h = (first + i) / width; h != head) {
                    head = h;
                    if (!op.a_by_state) keep = exp1(dt[head] * a[head]);
                    if (head / group != of) {
                        of = head / group;
                        widen(at<T>(op.b, s) + int64_t(row) * op.b_stride + of * states, b, states);
                        widen(at<T>(op.c, s) + int64_t(row) * op.c_stride + of * states, c, states);
                    }
                }
                const float in = scans::number(x[i]);
                const vf take = splat(dt[head] * in), step = splat(dt[head]), same = splat(keep);
                float* h = held + i * padded;
                vf total{};
                for (int n = 0; n < padded; n += LANES) {
                    vf factor = op.a_by_state ? exp(step * load<vf>(decay + i * padded + n)) : same;
                    vf now = fma(take, load<vf>(b + n), load<vf>(h + n) * factor);
                    store(h + n, now);
                    total = fma(now, load<vf>(c + n), total);
                }
                out[int64_t(row) * channels + i] = std::fma(d[head], in, sum(total));
            }
        },
        [&](int to) {
            for (int i = 0; i < count; i++)
                std::copy_n(held + i * padded, states, state + to * slot + i * states);
        });
}

}  // namespace

const Kernel space_scan_kernel[2] = {tiled<space_tiles, space<bf16>>,
                                     tiled<space_tiles, space<float>>};
