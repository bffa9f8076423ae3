// From final logits to one token a row. The definition is that of sylvan.runtime.sampling; rows are independent, and each
// is done by one thread in a fixed order, so that a draw depends on its own logits and parameters only.
#include "sample.h"
#include "../native/kernel.h"
#include "../native/pool.h"
#include <cfloat>
#include <cmath>

namespace {

constexpr int BINS = 2048, BIN_SHIFT = 19;  // of a probability in (0, 1]: sign, exponent and 4 bits of mantissa
constexpr int BLOCK = 512;

struct Candidate {
    float p;
    int32_t id;
    bool operator<(const Candidate& b) const { return p != b.p ? p > b.p : id < b.id; }  // the likelier first
};

struct Desk {  // memory that a thread keeps between rows
    std::vector<float> p;
    std::vector<Candidate> found, edge;
    std::vector<int> counts;
    std::vector<double> sums;
};

vf part(const float* x, int i, int n, float beyond) {  // sixteen of n, then `beyond`
    if (n - i >= LANES) return load<vf>(x + i);
    vf v = splat(beyond);
    memcpy(&v, x + i, (n - i) * sizeof(float));
    return v;
}

void put_part(float* x, int i, int n, vf v) { memcpy(x + i, &v, std::min(LANES, n - i) * sizeof(float)); }

int largest_logit(const float* x, int n) {  // the first of equals; NaN never wins
    vf tops = splat(-INFINITY);
    vi at = lanes();
    for (int i = 0; i < n; i += LANES) {
        vf v = part(x, i, n, -INFINITY);
        vi better = v > tops;
        tops = better ? v : tops;
        at = better ? lanes() + i : at;
    }
    float top = largest(tops);
    int best = n;
    for (int l = 0; l < LANES; l++)
        if (tops[l] == top) best = std::min(best, int(at[l]));
    return best < n ? best : 0;
}

int bin_of(float p) {
    uint32_t bits;
    memcpy(&bits, &p, 4);
    return int(bits >> BIN_SHIFT);
}

double uniform(uint64_t seed, uint64_t sample, uint64_t position) {  // Philox4x32-10: see runtime/sampling/philox.py
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(sample), 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++, k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u) {
        uint64_t low = uint64_t(c[0]) * 0xD2511F53u, high = uint64_t(c[2]) * 0xCD9E8D57u;
        uint32_t next[4] = {uint32_t(high >> 32) ^ c[1] ^ k[0], uint32_t(high), uint32_t(low >> 32) ^ c[3] ^ k[1], uint32_t(low)};
        memcpy(c, next, sizeof c);
    }
    return (double(c[0] >> 5) * 67108864.0 + double(c[1] >> 6)) / 9007199254740992.0;
}

struct Weights {  // p = exp((x - top) / temperature) of a row, and the sum; sums run over blocks, then over ids
    const std::vector<float>& p;
    int n;
    double total = 0;

    Weights(const float* x, int n, float top, float temperature, std::vector<float>& p) : p(p), n(n) {
        int padded = round_up(n, LANES);
        p.resize(padded);
        vf tops = splat(top), inverse = splat(1.f / temperature);
        for (int i = 0; i < padded; i += LANES) {
            vf v = (part(x, i, n, -INFINITY) - tops) * inverse;
            store(p.data() + i, v > -87.f ? exp(v) : vf{});
        }
        for (int i = 0; i < padded; i += BLOCK) total += block(i);
    }

    double block(int begin) const {
        double sum = 0;
        for (int i = begin, end = std::min(begin + BLOCK, int(p.size())); i < end; i += LANES) sum += double(::sum(load<vf>(p.data() + i)));
        return sum;
    }

    int draw(double u) const {  // the first id at which the running sum exceeds u times the total; -1: there is none
        double target = u * total, before = 0;
        for (int b = 0; b < n; b += BLOCK) {
            double after = before + block(b);
            if (after > target) {
                int last = -1;
                for (int i = b, end = std::min(b + BLOCK, n); i < end; i++) {
                    if (p[i] > 0) last = i;
                    if ((before += p[i]) > target) return i;
                }
                if (last >= 0) return last;  // rounding: the block's sum and its parts differ
            }
            before = after;
        }
        for (int i = n - 1; i >= 0; i--)
            if (p[i] > 0) return i;
        return -1;
    }
};

struct Cut {  // what of the candidates, ordered, is kept: those that come no later than `last`
    Candidate last;
    double mass;
    bool keeps(const Candidate& c) const { return !(last < c); }
};

class Filtered {  // draws among the likely ids only
  public:
    Filtered(const Weights& w, int64_t k, float top_p, float min_p, Desk& desk) : w(w), k(k), top_p(top_p), min_p(min_p), desk(desk) {}

    int draw(double u) {
        bool renormalised = top_p < 1.f && min_p > 0.f && k < w.n;  // top-p of the first k's mass
        double wanted = top_p < 1.f ? top_p * w.total : INFINITY;
        collect(renormalised ? INFINITY : wanted, renormalised ? 0.f : min_p);
        if (desk.found.empty()) return -1;
        if (renormalised) wanted = top_p * cut(INFINITY).mass;
        Cut kept = cut(wanted);
        double sum = 0;
        for (const Candidate& c : desk.found) sum += keeps(kept, c) ? c.p : 0;
        double target = u * sum, before = 0;
        int id = -1;
        for (const Candidate& c : desk.found) {
            if (!keeps(kept, c)) continue;
            id = c.id;
            if ((before += c.p) > target) break;
        }
        return id;
    }

  private:
    const Weights& w;
    int64_t k;
    float top_p, min_p;
    Desk& desk;

    // The largest p is exactly 1.
    bool keeps(const Cut& cut, const Candidate& c) const { return c.p >= min_p && cut.keeps(c); }

    // All that may be kept, by rising id: first only what is likely, which is nearly always enough.
    void collect(double wanted, float least) {
        for (float level : {0x1p-8f, 0x1p-16f, 0.f}) {
            float from = std::max(level, least);
            double mass = gather(from);
            if (from == least || int64_t(desk.found.size()) >= k || mass > wanted * (1 + 1e-6)) return;
        }
    }

    double gather(float least) {
        auto& found = desk.found;
        found.clear();
        double mass = 0;
        vf bar = splat(least);
        for (int i = 0; i < w.n; i += LANES) {
            vf v = load<vf>(w.p.data() + i);
            if (!any((v >= bar) & (v > 0.f))) continue;
            for (int l = 0; l < LANES; l++)
                if (v[l] >= least && v[l] > 0) found.push_back({v[l], i + l}), mass += v[l];
        }
        return mass;
    }

    // Whole bins while they surely fit within the first k and the wanted mass; the bin where that ends is put in order.
    Cut cut(double wanted) {
        desk.counts.assign(BINS, 0), desk.sums.assign(BINS, 0);
        for (const Candidate& c : desk.found) {
            int bin = bin_of(c.p);
            desk.counts[bin]++, desk.sums[bin] += c.p;
        }
        int64_t count = 0;
        double before = 0;
        int bin = bin_of(1.f);
        for (; bin > 0; bin--) {
            if (count + desk.counts[bin] >= k || !(before + desk.sums[bin] < wanted * (1 - 1e-9))) break;
            count += desk.counts[bin], before += desk.sums[bin];
        }
        auto& edge = desk.edge;
        edge.clear();
        for (const Candidate& c : desk.found)
            if (bin_of(c.p) == bin) edge.push_back(c);
        std::sort(edge.begin(), edge.end());
        Cut cut{{lowest_of(bin + 1), INT32_MAX}, before};  // all of the bins above
        for (const Candidate& c : edge) {
            if (count++ >= k || !(cut.mass < wanted)) break;
            cut.last = c, cut.mass += c.p;
        }
        return cut;
    }

    static float lowest_of(int bin) {
        uint32_t bits = uint32_t(bin) << BIN_SHIFT;
        float p;
        memcpy(&p, &bits, 4);
        return p;
    }
};

// Log probabilities: (x - top) / temperature - log(total).
struct LogSoftmax {
    const float* x;
    int n;
    float top, temperature;
    double log_total;

    float of(int id) const { return float(double((x[id] - top) / temperature) - log_total); }

    void most_likely(int count, int32_t* ids, float* values, Desk& desk) const {
        auto& heap = desk.found;  // the worst of the best in front
        heap.clear();
        int i = 0;
        for (; i < std::min(count, n); i++) heap.push_back({x[i] == x[i] ? x[i] : -INFINITY, i});
        std::make_heap(heap.begin(), heap.end());
        for (; i < n && count > 0; i += LANES) {
            vf v = part(x, i, n, -INFINITY);
            if (!any(v > splat(heap.front().p))) continue;
            for (int l = 0; l < LANES; l++) {
                if (!(v[l] > heap.front().p)) continue;  // of equals the earlier id stays
                std::pop_heap(heap.begin(), heap.end());
                heap.back() = {v[l], i + l};
                std::push_heap(heap.begin(), heap.end());
            }
        }
        std::sort_heap(heap.begin(), heap.end());
        for (size_t j = 0; j < heap.size(); j++) ids[j] = heap[j].id, values[j] = of(heap[j].id);
    }
};

void write_logprobs(const LogSoftmax& from, int id, int top, const int32_t* chosen, int num_chosen, const Logprobs& to, int row, Desk& desk) {
    to.own[row] = from.of(id);
    if (top) from.most_likely(std::min(top, from.n), to.top_ids + int64_t(row) * to.top_stride, to.top + int64_t(row) * to.top_stride, desk);
    for (int i = 0; i < num_chosen; i++) to.chosen[int64_t(row) * to.chosen_stride + i] = from.of(std::clamp(chosen[i], 0, from.n - 1));
}

class Row {
  public:
    Row(const Sample& s, int row, Desk& desk)
        : s(s), t(*s.params), row(row), slot(s.slots[row]), n(s.vocab), x(s.logits + row * s.stride), desk(desk) {}

    void sample() {
        change();
        bool wants = s.logprobs.own && t.has_logprobs[slot];
        if (!t.greedy[slot] || wants) clean();
        int best = largest_logit(x, n), id = best;
        s.failed[row] = !(x[best] > -INFINITY);
        if ((!t.greedy[slot] || wants) && !s.failed[row]) {
            Weights w(x, n, x[best], t.temperature[slot], desk.p);
            if (!t.greedy[slot]) id = draw(w);
            if (id < 0) id = best;
            if (wants) {
                LogSoftmax from{x, n, x[best], t.temperature[slot], std::log(w.total)};
                write_logprobs(from, id, t.top[slot], list<int32_t>(t.chosen_ids), t.num_chosen[slot], s.logprobs, row, desk);
            }
        }
        s.ids[row] = id;
    }

  private:
    const Sample& s;
    const SampleSlots& t;
    int row, slot, n;
    float* x;
    Desk& desk;

    template <class T> const T* list(const int64_t* addresses) const { return reinterpret_cast<const T*>(addresses[slot]); }

    int draw(const Weights& w) {
        double u = uniform(t.seed[slot], t.sample[slot], s.positions[row]);
        bool filtered = t.top_k[slot] < n || t.top_p[slot] < 1.f || t.min_p[slot] > 0.f;
        return filtered ? Filtered(w, t.top_k[slot], t.top_p[slot], t.min_p[slot], desk).draw(u) : w.draw(u);
    }

    void change() {  // the order is the contract's
        if (t.has_penalty[slot]) penalise(t.counts + t.counts_row[slot] * n);
        if (s.positions[row] < t.min_position[slot])
            for (int i = 0; i < t.num_stops[slot]; i++) x[list<int32_t>(t.stops)[i]] = -INFINITY;
        if (s.mask_of && s.mask_of[row] >= 0) mask(s.masks + s.mask_of[row] * s.mask_stride);
        for (int i = 0; i < t.num_bias[slot]; i++) x[list<int32_t>(t.bias_ids)[i]] += list<float>(t.bias)[i];
    }

    void penalise(const float* counts) {
        vf frequency = splat(t.frequency[slot]), presence = splat(t.presence[slot]), repetition = splat(t.repetition[slot]);
        for (int i = 0; i < n; i += LANES) {
            vf count = part(counts, i, n, 0.f);
            if (!any(count > 0.f)) continue;
            vf old = part(x, i, n, 0.f), v = old - frequency * count - presence;
            v = v > 0.f ? v / repetition : v * repetition;
            put_part(x, i, n, count > 0.f ? v : old);
        }
    }

    void mask(const int32_t* bits) {
        for (int i = 0; i < n; i += LANES) {
            uint32_t half = uint32_t(bits[i >> 5]) >> (i & 31) & 0xffff;
            if (half == 0xffff) continue;
            vi keep = ((vi{} + int32_t(half)) >> lanes()) & 1;
            put_part(x, i, n, keep ? part(x, i, n, 0.f) : splat(-INFINITY));
        }
    }

    void clean() {  // NaN can never win; infinities become the largest finite number, so that sums stay finite
        for (int i = 0; i < n; i += LANES) {
            vf v = part(x, i, n, 0.f);
            v = v == v ? v : splat(-INFINITY);
            put_part(x, i, n, min(v, splat(FLT_MAX)));
        }
    }
};

struct Drawing {
    const Sample* sample;
    std::atomic<int> next;
};

struct Telling {
    const Given* given;
    std::atomic<int> next;
};

void tell_rows(void* arg, int) {
    auto& d = *static_cast<Telling*>(arg);
    const Given& g = *d.given;
    thread_local Desk desk;
    for (int r; (r = d.next.fetch_add(1, std::memory_order_relaxed)) < g.rows;) {
        const float* x = g.logits + r * g.stride;
        float top = x[largest_logit(x, g.vocab)];
        Weights w(x, g.vocab, top, 1.f, desk.p);
        write_logprobs({x, g.vocab, top, 1.f, std::log(w.total)}, g.ids[r], g.top, g.chosen_ids, g.num_chosen, g.logprobs, r, desk);
    }
}

void run_rows(void (*job)(void*, int), void* arg, int rows) {
    if (rows <= 1) return job(arg, 0);  // not worth waking anybody
    Pool& pool = Pool::shared();
    std::lock_guard lock(pool.busy);
    pool.run(job, arg);
}

}  // namespace

bool wants_largest(const Sample& s, int row) {
    const SampleSlots& t = *s.params;
    int slot = s.slots[row];
    bool stops = t.num_stops[slot] && s.positions[row] < t.min_position[slot];
    bool changed = t.has_penalty[slot] || stops || t.num_bias[slot] || (s.mask_of && s.mask_of[row] >= 0);
    return t.greedy[slot] && !changed && !(s.logprobs.own && t.has_logprobs[slot]);
}

void sample_rows(const Sample& sample, std::atomic<int>& next, const Best* best) {
    thread_local Desk desk;
    for (int r; (r = next.fetch_add(1, std::memory_order_relaxed)) < sample.rows;) {
        if (!best || best[r].id == WHOLE_ROW) {
            Row(sample, r, desk).sample();
            continue;
        }
        sample.failed[r] = best[r].id == NO_LOGIT;
        sample.ids[r] = sample.failed[r] ? 0 : best[r].id;
    }
}

int count_failed(const Sample& sample) { return int(std::count(sample.failed, sample.failed + sample.rows, 1)); }

SYLVAN_API int sylvan_sample(const Sample* sample) {  // how many rows failed
    Drawing d{sample, 0};
    run_rows([](void* arg, int) {
        auto& mine = *static_cast<Drawing*>(arg);
        sample_rows(*mine.sample, mine.next);
    }, &d, sample->rows);
    return count_failed(*sample);
}

SYLVAN_API void sylvan_logprobs(const Given* given) {
    Telling d{given, 0};
    run_rows(tell_rows, &d, given->rows);
}
