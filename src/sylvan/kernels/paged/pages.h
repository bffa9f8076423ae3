// How keys and values lie in pages. A word of E::ELEMENTS numbers (two bf16, or one float32) is the unit of a dot product.
// Pages of int8 hold levels in the same order, a byte each, and behind those of a head a float32 scale for each token.
// K: [page][head][token / 16][word of columns][16][elements]; V: [page][head][token / elements][column][elements].
#pragma once
#include "../native/kernel.h"

constexpr int KEY_PAD = 32, VALUE_PAD = 16;  // columns of a head are padded to so many

// n of both ops: 0 query heads, 1 KV heads, 2 columns of q and k, 3 columns of v, 4 tokens of a page, 9 every token sees its whole
// text, which this step holds and whose pages are Step::texts', 10 pages are of int8 (1), or hold keys only, of which the first columns
// are the values (2), 12 group of layers whose page table is read, 13 and 14 numbers from one page's keys to the next one's, and values
struct Heads {
    int hq, hkv, dim, v_dim, page;
    bool small, shared;
    int64_t k_dim, v_pad;  // padded columns
    int64_t k_page, v_page;

    explicit Heads(const Op& op)
        : hq(op.n[0]), hkv(op.n[1]), dim(op.n[2]), v_dim(op.n[3]), page(op.n[4]), small(op.n[10] == 1), shared(op.n[10] == 2),
          k_dim(round_up(dim, KEY_PAD)), v_pad(round_up(v_dim, VALUE_PAD)), k_page(op.n[13]), v_page(op.n[14]) {}
    int64_t qkv_stride() const { return stride((hq + hkv) * dim + hkv * v_dim); }
    int64_t k_head(int64_t page_id, int head) const { return page_id * k_page + head * page * (k_dim + scale_bytes()); }
    int64_t v_head(int64_t page_id, int head) const { return page_id * v_page + head * page * (v_pad + scale_bytes()); }
    int64_t scale_bytes() const { return small ? sizeof(float) : 0; }
};
