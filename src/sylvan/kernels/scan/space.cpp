// Selective state spaces: of each channel, h = exp(dt A) h + dt x B, and C . h + D x comes out.
// buf: x [rows][H][P], dt f32 [rows][H], A f32 [H] or [H][N] (negative), B and C [rows][G][N], D f32 [H], state f32 [slots][H][P][N],
// out f32 [rows][H][P], and see scan.h.
// n: P, H, N, G, whether A differs by state, elements from row to row of x, B, C and dt.
#include "scan.h"

namespace {

constexpr int SPACE_CHANNELS = 32, SPACE_SPANS = 8;

int space_tiles(const Op& op, const Step& s) { return s.run->seqs * ceil_div(op.n[0] * op.n[1], SPACE_CHANNELS); }

template <class T> void widen(const T* from, float* to, int n) {  // and zeros up to whole vectors
    for (int i = 0; i < n; i += LANES) store(to + i, scans::get(from + i, n - i));
}

template <class T> void space(const Op& op, const Step& s, int t, void* scratch) {
    const int width = op.n[0], heads = op.n[1], states = op.n[2], group = heads / op.n[3], channels = width * heads;
    const int blocks = ceil_div(channels, SPACE_CHANNELS), padded = round_up(states, LANES);
    const int first = t % blocks * SPACE_CHANNELS, count = std::min(SPACE_CHANNELS, channels - first);
    const scans::Span span = scans::span(op, s, t / blocks, SPACE_SPANS);
    if (!span.rows) return;
    const float *a = at<float>(op, s, 2), *d = at<float>(op, s, 5);
    float *state = at<float>(op, s, 6) + int64_t(first) * states, *out = at<float>(op, s, 7) + first;
    float *held = static_cast<float*>(scratch), *decay = held + SPACE_CHANNELS * padded;
    float *b = decay + SPACE_CHANNELS * padded, *c = b + padded;
    const int64_t slot = int64_t(channels) * states;
    for (int i = 0; i < count; i++) {
        widen(state + span.slot * slot + i * states, held + i * padded, states);
        if (op.n[4]) widen(a + int64_t(first + i) / width * states, decay + i * padded, states);
    }
    scans::walk(op, s, span, SPACE_SPANS, [&](int row) {
        const T* x = at<T>(op, s, 0) + int64_t(row) * op.n[5] + first;
        const float* dt = at<float>(op, s, 1) + int64_t(row) * op.n[8];
        int head = -1, of = -1;
        float keep = 0;
        for (int i = 0; i < count; i++) {
            if (int h = (first + i) / width; h != head) {
                head = h;
                if (!op.n[4]) keep = exp1(dt[head] * a[head]);
                if (head / group != of) {
                    of = head / group;
                    widen(at<T>(op, s, 3) + int64_t(row) * op.n[6] + of * states, b, states);
                    widen(at<T>(op, s, 4) + int64_t(row) * op.n[7] + of * states, c, states);
                }
            }
            const float in = scans::number(x[i]);
            const vf take = splat(dt[head] * in), step = splat(dt[head]), same = splat(keep);
            float* h = held + i * padded;
            vf total{};
            for (int n = 0; n < padded; n += LANES) {
                vf factor = op.n[4] ? exp(step * load<vf>(decay + i * padded + n)) : same;
                vf now = fma(take, load<vf>(b + n), load<vf>(h + n) * factor);
                store(h + n, now);
                total = fma(now, load<vf>(c + n), total);
            }
            out[int64_t(row) * channels + i] = std::fma(d[head], in, sum(total));
        }
    }, [&](int to) {
        for (int i = 0; i < count; i++) std::copy_n(held + i * padded, states, state + to * slot + i * states);
    });
}

}  // namespace

const Kernel space_scan_kernel[2] = {{space_tiles, space<bf16>}, {space_tiles, space<float>}};
