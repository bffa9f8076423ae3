// Packs rows of unquantised weights in the order of `pack.py`, and quantises them if the kernels
// need it, bit-identical to `quantise_int8` and `quantise_int4`. One pass; the search for the
// largest magnitude runs while the numbers are in the cache.
#include "../native/kernel.h"
#include "../native/pool.h"

namespace {

enum Kind : int32_t { PLAIN, EIGHT_BITS, FOUR_BITS };  // `_KINDS` of packing.py

// Magnitudes order as their bits; infinity and NaN sort above all others.
struct Largest {
    vi bits{};
    void take(vi v) {
        v = v & 0x7fffffff;
        bits = select(v > bits, v, bits);
    }
    void take_pairs(vu words) {
        take((vi)words);
        take((vi)(words << 16));
    }  // of bf16 or float16
    int32_t value() const {
        return reduce(bits, [](auto a, auto b) { return a > b ? a : b; });
    }
};
// as the upper half of a word
constexpr int32_t F32_INFINITY = 0x7f800000, F16_INFINITY = 0x7c000000;

template <class T> vf some(const T* x, int64_t left) {  // zeros behind the last of a row
    if (left >= LANES) return get(x);
    T part[LANES] = {};
    if (left > 0) memcpy(part, x, left * sizeof(T));
    return get(part);
}
template <class T> vu words_of(const T* x, int64_t left) {
    constexpr int each = LANES * 4 / sizeof(T);
    if (left >= each) return load<vu>(x);
    T part[each] = {};
    if (left > 0) memcpy(part, x, left * sizeof(T));
    return load<vu>(part);
}

struct Packing {
    const PackedRows& to;
    std::atomic<int64_t> next{0};
    std::atomic<int> bad{0};

    int64_t begin() const { return to.first / LANES; }
    int64_t end() const { return (to.first + to.count + LANES - 1) / LANES; }
};

// Words [word, word + 16) of the lanes of a block that have a row here.
void put_words(const PackedRows& to, int64_t block, int low, int high, int64_t word,
               const uint32_t (*tile)[LANES]) {
    int count = int(std::min<int64_t>(LANES, to.words - word));
    uint32_t* out = reinterpret_cast<uint32_t*>(to.data) + (block * to.words + word) * LANES;
    if (high - low == LANES) {
        for (int w = 0; w < count; w++)
            for (int l = 0; l < LANES; l++) out[w * LANES + l] = tile[l][w];
        return;
    }
    for (int w = 0; w < count; w++)
        for (int l = low; l < high; l++) out[w * LANES + l] = tile[l][w];
}

// Quantises one row, 64 inputs at a time; a format first computes what it needs of the whole row or
// group.
template <class T> struct Plain {
    static constexpr int INPUTS = LANES * 4 / sizeof(T);
    Largest largest;
    void begin(const PackedRows&, int64_t, const T*) {}
    void some_words(const PackedRows& to, int64_t, const T* x, int64_t at, uint32_t* out) {
        vu words = words_of(x + at, to.cols - at);
        if constexpr (sizeof(T) == 2)
            largest.take_pairs(words);
        else
            largest.take((vi)words);
        store(out, words);
    }
    void end(const PackedRows&, int64_t) {}
    bool finite() const { return largest.value() < F32_INFINITY; }
};

template <class T> struct EightBits {
    static constexpr int INPUTS = 4 * LANES;
    float scale = 0;
    int32_t most = 0;
    vi total{};
    void begin(const PackedRows& to, int64_t, const T* x) {
        Largest largest;
        for (int64_t i = 0; i < to.cols; i += LANES) largest.take((vi)some(x + i, to.cols - i));
        int32_t found = largest.value();
        most = std::max(most, found);
        float magnitude;
        memcpy(&magnitude, &found, sizeof magnitude);
        scale = std::max(magnitude / 127.f, 1e-30f);
        total = vi{};
    }
    void some_words(const PackedRows& to, int64_t, const T* x, int64_t at, uint32_t* out) {
        // 1.5 * 2^23: adding it rounds to the nearest, of two the even one
        const vf magic = splat(12582912.f);
        for (int part = 0; part < 4; part++, at += LANES) {
            vf v = min(max(some(x + at, to.cols - at) / scale, splat(-127.f)), splat(127.f));
            vi q = (vi)(v + magic) - (vi)magic;
            narrow(reinterpret_cast<int8_t*>(out) + part * LANES, q);
            total += q;
        }
    }
    void end(const PackedRows& to, int64_t row) {
        to.scale[row] = scale;
        to.sums[row] = sum(total);
    }
    bool finite() const { return most < F32_INFINITY; }
};

template <class T> struct FourBits {
    static constexpr int INPUTS = 8 * LANES;
    int32_t most = 0;
    void begin(const PackedRows&, int64_t, const T*) {}
    void some_words(const PackedRows& to, int64_t row, const T* x, int64_t at, uint32_t* out) {
        int group = to.group;
        uint8_t levels[INPUTS];
        memset(levels, 8, sizeof levels);
        for (int64_t i = 0; i < INPUTS && at + i < to.cols; i += group)
            round(to, row, x + at + i, at + i, levels + i);
        for (int w = 0; w < LANES; w++) {  // of eight inputs: the first four go to the low nibbles
            uint32_t low, high;
            memcpy(&low, levels + 8 * w, 4);
            memcpy(&high, levels + 8 * w + 4, 4);
            out[w] = low | high << 4;
        }
    }
    // Quantises a group; its number of largest magnitude becomes -8.
    void round(const PackedRows& to, int64_t row, const T* x, int64_t at, uint8_t* levels) {
        Largest largest;
        for (int i = 0; i < to.group; i += LANES) largest.take((vi)get(x + i));
        int32_t found = largest.value();
        most = std::max(most, found);
        float extreme = 0;
        for (int i = 0; i < to.group; i += LANES)
            if (uint32_t equal = bits(((vi)get(x + i) & 0x7fffffff) == found)) {
                extreme = get(x + i)[__builtin_ctz(equal)];
                break;
            }
        float inverse = extreme == 0 ? 0.f : -8.f / extreme;
        const vf magic = splat(12582912.f);
        for (int i = 0; i < to.group; i += LANES) {
            vf v = min(max(get(x + i) * inverse, splat(-8.f)), splat(7.f));
            narrow(levels + i, (vi)(v + magic) - (vi)magic + 8);
        }
        int64_t groups = to.words * 8 / to.group;
        to.scale[((row / LANES) * groups + at / to.group) * LANES + row % LANES] = extreme / -8.f;
    }
    void end(const PackedRows&, int64_t) {}
    bool finite() const { return most < F32_INFINITY; }
};

template <class T, template <class> class Format> void pack_block(Packing& work, int64_t block) {
    const PackedRows& to = work.to;
    constexpr int inputs = Format<T>::INPUTS;
    int low = int(std::max<int64_t>(0, to.first - block * LANES));
    int high = int(std::min<int64_t>(LANES, to.first + to.count - block * LANES));
    Format<T> rows[LANES];
    auto row = [&](int lane) {
        return reinterpret_cast<const T*>(to.rows +
                                          (block * LANES + lane - to.first) * to.row_step);
    };
    for (int lane = low; lane < high; lane++) rows[lane].begin(to, block * LANES + lane, row(lane));
    alignas(64) uint32_t tile[LANES][LANES];
    for (int64_t at = 0; at < to.cols; at += inputs) {
        for (int lane = low; lane < high; lane++)
            rows[lane].some_words(to, block * LANES + lane, row(lane), at, tile[lane]);
        put_words(to, block, low, high, at / inputs * LANES, tile);
    }
    for (int lane = low; lane < high; lane++) {
        rows[lane].end(to, block * LANES + lane);
        if (!rows[lane].finite()) work.bad.store(1, std::memory_order_relaxed);
    }
}

template <class T> void pack_any(Packing& work, int64_t block) {
    if (work.to.kind == PLAIN)
        pack_block<T, Plain>(work, block);
    else if (work.to.kind == EIGHT_BITS)
        pack_block<T, EightBits>(work, block);
    else
        pack_block<T, FourBits>(work, block);
}

struct FiniteCheck {
    static constexpr int64_t BLOCK = 1 << 18;  // bytes
    const char* data;
    int64_t bytes;
    bool pairs;
    int32_t limit;
    std::atomic<int64_t> next{0};
    std::atomic<int> bad{0};

    void block(int64_t index) {
        int64_t at = index * BLOCK, end = std::min(at + BLOCK, bytes);
        Largest found[4];  // chains side by side
        for (; at + 4 * 64 <= end; at += 4 * 64)
            for (int i = 0; i < 4; i++) take(found[i], load<vu>(data + at + 64 * i));
        for (; at < end; at += 64) take(found[0], words_of(data + at, end - at));
        for (const Largest& one : found)
            if (one.value() >= limit) bad.store(1, std::memory_order_relaxed);
    }
    void take(Largest& to, vu words) const { pairs ? to.take_pairs(words) : to.take((vi)words); }
};

constexpr int64_t FEW = 128 << 10;  // bytes that the caller packs before helpers would wake up

// Calls f with 0 .. count - 1: on all threads if the work is large and no step uses them, so
// loading never waits for a step.
template <class W, class F> void share(W& work, int64_t count, int64_t bytes, F f) {
    Pool& pool = Pool::shared();
    std::unique_lock lock(pool.busy, std::defer_lock);
    if (bytes <= FEW || pool.size() == 1 || count == 1 || !lock.try_lock()) {
        for (int64_t i = 0; i < count; i++) f(work, i);
        return;
    }
    struct Job {
        W& work;
        int64_t count;
        F& f;
    } job{work, count, f};
    pool.run(
        [](void* arg, int) {
            auto& j = *static_cast<Job*>(arg);
            for (int64_t i; (i = j.work.next.fetch_add(1, std::memory_order_relaxed)) < j.count;)
                j.f(j.work, i);
        },
        &job);
}

}  // namespace

// Packs rows into their places; returns whether all numbers are finite. Padding stays unchanged.
SYLVAN_API int sylvan_pack_rows(const PackedRows* to) {
    Packing work{*to};
    int64_t first = work.begin(), size = to->type == BF16 ? sizeof(bf16) : sizeof(float);
    share(work, work.end() - first, to->count * to->cols * size, [first](Packing& p, int64_t i) {
        p.to.type == BF16 ? pack_any<bf16>(p, first + i) : pack_any<float>(p, first + i);
    });
    return !work.bad.load();
}

// Whether numbers of 4 bytes, or of 2 (bf16, or float16 if `half`), contain neither NaN nor
// infinity.
SYLVAN_API int sylvan_all_finite(const char* data, int64_t bytes, int size, int half) {
    FiniteCheck work{data, bytes, size == 2, half ? F16_INFINITY : F32_INFINITY};
    share(work, (bytes + FiniteCheck::BLOCK - 1) / FiniteCheck::BLOCK, bytes,
          [](FiniteCheck& l, int64_t i) { l.block(i); });
    return !work.bad.load();
}
