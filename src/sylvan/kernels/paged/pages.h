// Layout of keys and values in pages. A word of E::ELEMENTS numbers (two bf16, or one float32) is
// the unit of a dot product. int8 pages hold levels in the same order, one byte each, followed for
// each head by a float32 scale per token. K: [page][head][token / 16][word of
// columns][16][elements]; V: [page][head][token / elements][column][elements].
#pragma once
#include "../native/kernel.h"

constexpr int KEY_PAD = 32, VALUE_PAD = 16;  // columns of a head are padded to a multiple of these

struct Heads {
    int hq, hkv, dim, v_dim, page;
    bool small, shared;
    int64_t k_dim, v_pad;  // padded columns
    int64_t k_page, v_page;

    explicit Heads(const KVPages& kv)
        : hq(kv.num_heads), hkv(kv.num_kv_heads), dim(kv.head_dim), v_dim(kv.value_dim), page(kv.page_size),
          small(kv.format == PageFormat::INT8), shared(kv.format == PageFormat::SHARED), k_dim(round_up(dim, KEY_PAD)),
          v_pad(round_up(v_dim, VALUE_PAD)), k_page(kv.key_step), v_page(kv.value_step) {}
    int64_t qkv_stride() const { return stride((hq + hkv) * dim + hkv * v_dim); }
    int64_t k_head(int64_t page_id, int head) const { return page_id * k_page + head * page * (k_dim + scale_bytes()); }
    int64_t v_head(int64_t page_id, int head) const { return page_id * v_page + head * page * (v_pad + scale_bytes()); }
    int64_t scale_bytes() const { return small ? sizeof(float) : 0; }
};
