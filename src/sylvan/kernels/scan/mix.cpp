// Token shift of RWKV: rows mixed with the rows before them.
#include "scan.h"

namespace {

template <class T> void token_mix(const TokenMix& op, const Step& s, int64_t r) {
    const int64_t row = r * stride(op.cols);
    const T *x = at<T>(op.x, s) + row, *before = at<T>(op.before, s) + row;
    const T* gate = op.gate.present() ? at<T>(op.gate, s) + row : nullptr;
    const T* more = op.row_share.present()
                        ? at<T>(op.row_share, s) + r * op.row_share_stride + op.row_share_first
                        : nullptr;
    const float* share = at(op.share, s);
    T* out = at<T>(op.out, s) + row;
    for (int i = 0; i < stride(op.cols); i += LANES) {
        const vf a = get(x + i), b = get(before + i);
        vf part = gate ? scans::rounded<T>(sigmoid(get(gate + i))) : load<vf>(share + i);
        if (more) part = scans::rounded<T>(part + scans::get(more + i, op.cols - i));
        if (op.sums)
            put(out + i,
                scans::rounded<T>(a * part) + scans::rounded<T>(b * scans::rounded<T>(1.f - part)));
        else
            put(out + i, a + scans::rounded<T>(scans::rounded<T>(b - a) * part));
    }
}

}  // namespace

const Kernel token_mix_kernel[2] = {per_row<token_mix<bf16>>, per_row<token_mix<float>>};
