// Casts float32 rows to the rows' type.
#include "../native/kernel.h"

namespace {

template <class T> void cast(const Cast& op, const Step& s, int64_t r) {
    for (int64_t i = r * stride(op.cols), end = i + stride(op.cols); i < end; i += LANES)
        put(at<T>(op.out, s) + i, get(at(op.x, s) + i));
}

}  // namespace

const Kernel cast_kernel[2] = {per_row<cast<bf16>>, per_row<cast<float>>};
