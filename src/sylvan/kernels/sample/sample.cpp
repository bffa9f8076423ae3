// Draws one token a row. The definition is that of sylvan.runtime.sampling.draw; rows are independent, and each is done by
// one thread in a fixed order, so that a draw depends on its own logits and parameters only.
#include "../native/kernel.h"
#include "../native/pool.h"
#include <cmath>

struct Sample {  // mirrored in binding.py
    int32_t rows, vocab;
    int64_t stride;          // floats from row to row
    const float* logits;
    const uint8_t* greedy;   // [rows]
    const float* temperature;
    const int64_t* top_k;    // at least 1; the vocabulary or more means all
    const float* top_p;
    const float* min_p;
    const double* uniform;   // in [0, 1)
    int32_t* ids;            // result
};

namespace {

constexpr int BINS = 2048, BIN_SHIFT = 19;  // of a probability in (0, 1]: sign, exponent and 4 bits of mantissa
constexpr int BLOCK = 512;

struct Candidate {
    float p;
    int32_t id;
    bool operator<(const Candidate& b) const { return p != b.p ? p > b.p : id < b.id; }
};

vf logits_at(const float* x, int i, int n) {  // sixteen of them, minus infinity beyond the end
    vf v = splat(-INFINITY);
    if (n - i >= LANES) return load<vf>(x + i);
    memcpy(&v, x + i, (n - i) * sizeof(float));
    return v;
}

int largest_logit(const float* x, int n) {  // the first of equals; NaN never wins
    vf tops = splat(-INFINITY);
    for (int i = 0; i < n; i += LANES) {
        vf v = logits_at(x, i, n);
        tops = v > tops ? v : tops;
    }
    float top = largest(tops);
    for (int i = 0; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

int bin_of(float p) {
    uint32_t bits;
    memcpy(&bits, &p, 4);
    return int(bits >> BIN_SHIFT);
}

class Row {
  public:
    Row(const Sample& s, int row, std::vector<float>& room)
        : s(s), row(row), x(s.logits + row * s.stride), n(s.vocab), p(room) {}

    int draw() {
        int best = largest_logit(x, n);
        if (s.greedy[row]) return best;
        weigh(x[best]);
        bool filtered = s.top_k[row] < n || s.top_p[row] < 1.f || s.min_p[row] > 0.f;
        int id = filtered ? draw_filtered() : draw_plain();
        return id < 0 ? best : id;
    }

  private:
    const Sample& s;
    int row;
    const float* x;
    int n;
    std::vector<float>& p;
    double total = 0;

    void weigh(float top) {  // p = exp((x - top) / temperature), and the sum
        int padded = round_up(n, LANES);
        p.resize(padded);
        vf tops = splat(top), inverse = splat(1.f / s.temperature[row]);
        for (int i = 0; i < padded; i += LANES) {
            vf v = (logits_at(x, i, n) - tops) * inverse;
            store(p.data() + i, v > -87.f ? exp(v) : vf{});
        }
        for (int i = 0; i < padded; i += BLOCK) total += block_sum(i);
    }

    double block_sum(int begin) const {
        double sum = 0;
        for (int i = begin, end = std::min(begin + BLOCK, int(p.size())); i < end; i += LANES) sum += double(::sum(load<vf>(p.data() + i)));
        return sum;
    }

    // The first id at which the running sum exceeds the target; sums run over blocks, then over ids.
    int draw_plain() const {
        double target = s.uniform[row] * total, before = 0;
        for (int b = 0; b < n; b += BLOCK) {
            double after = before + block_sum(b);
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
        return last_possible();
    }

    int last_possible() const {
        for (int i = n - 1; i >= 0; i--)
            if (p[i] > 0) return i;
        return -1;
    }

    int draw_filtered() const {
        thread_local std::vector<Candidate> found;
        collect(found);
        std::sort(found.begin(), found.end());
        size_t count = keep(found);
        double kept = 0;
        for (size_t i = 0; i < count; i++) kept += found[i].p;
        std::sort(found.begin(), found.begin() + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        double target = s.uniform[row] * kept, before = 0;
        for (size_t i = 0; i < count; i++)
            if ((before += found[i].p) > target) return found[i].id;
        return count ? found[count - 1].id : -1;
    }

    // Everything that may be kept: whole bins of likely ids until top-k and top-p are surely satisfied.
    void collect(std::vector<Candidate>& found) const {
        thread_local std::vector<int> counts;
        thread_local std::vector<double> sums;
        counts.assign(BINS, 0), sums.assign(BINS, 0);
        for (int i = 0; i < n; i++) {
            int bin = bin_of(p[i]);
            counts[bin]++, sums[bin] += p[i];
        }
        int64_t count = 0;
        double sum = 0, wanted = s.top_p[row] < 1.f && s.min_p[row] == 0.f ? s.top_p[row] * total : INFINITY;
        int bin = BINS - 1;
        for (; bin > 0; bin--) {
            count += counts[bin], sum += sums[bin];
            if (count >= s.top_k[row] || sum > wanted * (1 + 1e-6)) break;
        }
        found.clear();
        for (int i = 0; i < n; i++)
            if (p[i] > 0 && bin_of(p[i]) >= bin) found.push_back({p[i], i});
    }

    size_t keep(const std::vector<Candidate>& found) const {  // how many of the ordered candidates stay
        size_t count = std::min<size_t>(found.size(), size_t(s.top_k[row]));
        double whole = total, before = 0;
        if (s.min_p[row] > 0) {
            whole = 0;
            for (size_t i = 0; i < count; i++) whole += found[i].p;
        }
        float least = count ? s.min_p[row] * found[0].p : 0.f;
        for (size_t i = 0; i < count; i++) {
            if (!(before < s.top_p[row] * whole) || found[i].p < least) return i;
            before += found[i].p;
        }
        return count;
    }
};

struct Drawing {
    const Sample* sample;
    std::atomic<int> next;
};

void draw_rows(void* arg, int) {
    auto& d = *static_cast<Drawing*>(arg);
    thread_local std::vector<float> room;
    for (int r; (r = d.next.fetch_add(1, std::memory_order_relaxed)) < d.sample->rows;)
        d.sample->ids[r] = Row(*d.sample, r, room).draw();
}

}  // namespace

SYLVAN_API void sylvan_sample(const Sample* sample) {
    Drawing d{sample, 0};
    Pool& pool = Pool::shared();
    std::lock_guard lock(pool.busy);
    pool.run(draw_rows, &d);
}
