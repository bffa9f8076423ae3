// buf: x f32, out; n: cols
#include "../native/kernel.h"

namespace {

template <class T> void cast(const Op& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.n[0]), end = i + stride(op.n[0]); i < end; i += LANES)
        put(at<T>(op, s, 1) + i, get(at<float>(op, s, 0) + i));
}

}  // namespace

const Kernel cast_kernel[2] = {{row_tiles, by_rows<cast<bf16>>}, {row_tiles, by_rows<cast<float>>}};
