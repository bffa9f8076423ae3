// Embedding rows are read out of the packed head, so that tied weights are stored once.
// buf: out f32, weight, column scale (int8: by vocabulary row; int4: by group and row); n: cols, ids (0), positions (1)
// or token types (2), words (padded K / elements), weight kind (0 rows' own type, 1 int8, 2 int4), group, rows: ids beyond read the
// last one; f: scale
#include "../native/kernel.h"

namespace {

template <class E> void embed(const Op& op, const Step& s, int64_t r) {
    int cols = op.n[0], words = op.n[2], group = op.n[4];
    const int32_t* ids = op.n[1] == 0 ? s.run->ids : op.n[1] == 1 ? s.run->positions : s.run->types;
    int64_t id = std::clamp(ids[r], 0, op.n[5] - 1), lane = id % LANES;
    float *out = at<float>(op, s, 0) + r * stride(cols), scale = op.f[0];
    const float* scales = at<float>(op, s, 2);
    if (op.n[3] == 0) {
        const uint32_t* w = at<uint32_t>(op, s, 1) + id / LANES * words * LANES + lane;
        for (int k = 0; k < ceil_div(cols, E::ELEMENTS); k++) {
            uint32_t word = w[int64_t(k) * LANES], parts[2] = {E::ELEMENTS == 2 ? word << 16 : word, word & 0xffff0000u};
            for (int e = 0; e < E::ELEMENTS; e++) {
                float x;
                memcpy(&x, &parts[e], 4);
                out[k * E::ELEMENTS + e] = x * scale;
            }
        }
    } else if (op.n[3] == 1) {
        const int8_t* w = at<int8_t>(op, s, 1) + (id / LANES * words * LANES + lane) * 4;
        for (int k = 0; k < cols; k++) out[k] = w[int64_t(k / 4) * 64 + k % 4] * scales[id] * scale;
    } else {  // eight inputs in a word: four low nibbles, then four high ones
        const uint8_t* w = at<uint8_t>(op, s, 1) + (id / LANES * words * LANES + lane) * 4;
        int groups = words * 8 / group;
        for (int k = 0; k < cols; k++) {
            int byte = w[int64_t(k / 8) * 64 + k % 4], level = (k / 4 % 2 ? byte >> 4 : byte & 15) - 8;
            out[k] = level * scales[(id / LANES * groups + k / group) * LANES + lane] * scale;
        }
    }
    for (int64_t k = cols; k < stride(cols); k++) out[k] = 0;
}

}  // namespace

const Kernel embed_kernel[2] = {{row_tiles, by_rows<embed<Bf16>>}, {row_tiles, by_rows<embed<F32>>}};
