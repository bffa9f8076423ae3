// Embedding rows are read out of the packed head, so that tied weights are stored once.
#include "../matmul/codes.h"

namespace {

void embed_coded(const Embed& op, const Step& s, int64_t id, float* out) {
    int64_t block = id / LANES, lane = id % LANES;
    const uint32_t* w = at<uint32_t>(op.weight, s) + block * op.words * LANES;
    with_code(op.code, op.zeros.present(), [&](auto kind) {
        using C = typename decltype(kind)::type;
        const C code(op.code);
        int each = op.group / (2 * C::PAIRS), units = op.words / C::WORDS, groups = units / each;
        const Scales scales(op, s, groups);
        for (int k = 0; k < units; k++) {
            int g = k / each;
            vu v[C::WORDS], zero = code.zero(scales, block, g);
            for (int i = 0; i < C::WORDS; i++)
                v[i] = load<vu>(w + (int64_t(k) * C::WORDS + i) * LANES);
            float scale = scales.scale(block, g)[lane];
            float shift = scales.shifts ? scales.shift(block, g)[lane] : 0;
            unrolled<C::PAIRS>([&](auto i) SYLVAN_INLINE {
                uint32_t pair = code.template pair<i>(v, zero)[lane];
                uint32_t halves[2] = {pair << 16, pair & 0xffff0000u};
                float values[2];
                memcpy(values, halves, sizeof values);
                for (int e = 0; e < 2; e++)
                    if (int at = (k * C::PAIRS + i) * 2 + e; at < op.cols)
                        out[at] = (values[e] * scale + shift) * op.scale;
            });
        }
    });
}

template <class E> void embed(const Embed& op, const Step& s, int64_t r) {
    int cols = op.cols, words = op.words, group = op.group;
    const int32_t* ids = op.source == Source::IDS         ? s.run->ids
                         : op.source == Source::POSITIONS ? s.run->positions
                                                          : s.run->types;
    float *out = at(op.out, s) + r * stride(cols), scale = op.scale;
    int64_t own = int64_t(ids[r]) - op.first_row;
    if (op.is_part && (own < 0 || own >= op.vocab_rows)) {  // another rank has the row
        std::fill(out, out + stride(cols), 0.0f);
        return;
    }
    int64_t id = std::clamp<int64_t>(own, 0, op.vocab_rows - 1), lane = id % LANES;
    const float* scales = at(op.col_scale, s);
    if (op.format == WeightFormat::DENSE) {
        const uint32_t* w = at<uint32_t>(op.weight, s) + id / LANES * words * LANES + lane;
        for (int k = 0; k < ceil_div(cols, E::ELEMENTS); k++) {
            uint32_t word = w[int64_t(k) * LANES];
            uint32_t parts[2] = {E::ELEMENTS == 2 ? word << 16 : word, word & 0xffff0000u};
            for (int e = 0; e < E::ELEMENTS; e++) {
                float x;
                memcpy(&x, &parts[e], 4);
                out[k * E::ELEMENTS + e] = x * scale;
            }
        }
    } else if (op.format == WeightFormat::CODED) {
        embed_coded(op, s, id, out);
    } else if (op.format == WeightFormat::INT8) {
        const int8_t* w = at<int8_t>(op.weight, s) + (id / LANES * words * LANES + lane) * 4;
        for (int k = 0; k < cols; k++) out[k] = w[int64_t(k / 4) * 64 + k % 4] * scales[id] * scale;
    } else {  // eight inputs in a word: four low nibbles, then four high ones
        const uint8_t* w = at<uint8_t>(op.weight, s) + (id / LANES * words * LANES + lane) * 4;
        int groups = words * 8 / group;
        for (int k = 0; k < cols; k++) {
            int byte = w[int64_t(k / 8) * 64 + k % 4];
            int level = (k / 4 % 2 ? byte >> 4 : byte & 15) - 8;
            out[k] = level * scales[(id / LANES * groups + k / group) * LANES + lane] * scale;
        }
    }
    for (int64_t k = cols; k < stride(cols); k++) out[k] = 0;
}

}  // namespace

const Kernel embed_kernel[2] = {per_row<embed<Bf16>>, per_row<embed<F32>>};
