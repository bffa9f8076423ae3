#include "draw.h"
#include <algorithm>

constexpr int BINS = 2048, BINS_PER_OCTAVE = 16;  // candidates are binned by their exponent

double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(sample), 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++, k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u) {
        uint64_t low = uint64_t(c[0]) * 0xD2511F53u, high = uint64_t(c[2]) * 0xCD9E8D57u;
        uint32_t next[4] = {uint32_t(high >> 32) ^ c[1] ^ k[0], uint32_t(high),
                            uint32_t(low >> 32) ^ c[3] ^ k[1], uint32_t(low)};
        memcpy(c, next, sizeof c);
    }
    return (double(c[0] >> 5) * 67108864.0 + double(c[1] >> 6)) / 9007199254740992.0;
}

Distribution::Distribution(const RowLogits& row, SamplerScratch& scratch)
    : row(row), scratch(scratch), scale(scale_of(row.temperature)) {
    const BlockStats& s = row.stats;
    vf tops = splat(-INFINITY);
    for (int i = 0; i < s.num_blocks; i += LANES) tops = max(tops, load<vf>(s.tops + i));
    top = largest(tops);
    if (!row.x) {
        for (const Candidate& c : scratch.kept) top = std::max(top, c.x);
        for (Candidate& c : scratch.kept) c.p = p(c.x);
    }
    scratch.masses.resize(round_up(s.num_blocks, LANES));
    for (int i = 0; i < s.num_blocks; i += LANES) {
        vf masses = load<vf>(s.sums + i) * weight(load<vf>(s.tops + i), top, scale);
        store(scratch.masses.data() + i, masses);
        total += double(sum(masses));
    }
}

int Distribution::bin_of(const Candidate& c) const {
    return std::min(BINS - 1, int((top - c.x) * scale * BINS_PER_OCTAVE));
}

// Finds the shortest prefix of the candidates that has k of them or the wanted mass. Counts whole
// bins as long as they fit for certain, and sorts only the bin in which the prefix ends.
Cut Distribution::cut(int64_t k, double wanted) const {
    scratch.counts.assign(BINS, 0);
    scratch.sums.assign(BINS, 0);
    for (const Candidate& c : scratch.found) {
        int bin = bin_of(c);
        scratch.counts[bin]++;
        scratch.sums[bin] += c.p;
    }
    int64_t count = 0;
    double before = 0;
    int bin = 0;
    for (; bin < BINS - 1; bin++) {
        if (count + scratch.counts[bin] >= k || !(before + scratch.sums[bin] < wanted * (1 - 1e-9)))
            break;
        count += scratch.counts[bin];
        before += scratch.sums[bin];
    }
    auto& edge = scratch.edge;
    edge.clear();
    for (const Candidate& c : scratch.found)
        if (bin_of(c) == bin) edge.push_back(c);
    std::sort(edge.begin(), edge.end());
    Cut cut{bin, false, {}, before};
    for (const Candidate& c : edge) {
        if (count++ >= k || !(cut.mass < wanted)) break;
        cut.last = c;
        cut.some = true;
        cut.mass += c.p;
    }
    return cut;
}

float Distribution::logit(int id) const {
    if (row.x) return row.keeps_non_finite ? row.x[id] : cleaned(row.x[id]);
    for (const Candidate& c : scratch.kept)
        if (c.id == id) return c.x;
    return -INFINITY;  // unreachable: rows whose other logits are read keep all of them
}

int Distribution::likeliest() const {
    if (!row.x) return std::min_element(scratch.kept.begin(), scratch.kept.end())->id;
    const BlockStats& s = row.stats;
    int block = int(std::find(s.tops, s.tops + s.num_blocks, top) - s.tops),
        id = block * STATS_BLOCK;
    while (cleaned(row.x[id]) != top) id++;
    return id;
}

int Distribution::draw(double u, const Filter& filter) const {
    int id = filter.keeps_all(row.n) ? draw_any(u) : draw_kept(u, filter);
    return id < 0 ? likeliest() : id;
}

int Distribution::draw_any(double u) const {
    const float* masses = scratch.masses.data();
    double target = u * total, before = 0;
    int last = -1;  // the last group of blocks with mass; drawn if rounding loses the target
    double before_last = 0;
    for (int i = 0; i < row.stats.num_blocks; i += LANES) {
        double after = before + double(sum(load<vf>(masses + i)));
        if (after > before) {
            last = i;
            before_last = before;
        }
        if (after > target) break;
        before = after;
    }
    return last < 0 ? -1 : draw_within(last, before_last, target);
}

// Draws within a group of blocks: the id at which the cumulative mass exceeds the target, or the
// last id with mass if rounding keeps the sum below it.
int Distribution::draw_within(int group, double before, double target) const {
    int found = -1;
    double start = before;
    for (int i = group; i < std::min(group + LANES, row.stats.num_blocks); i++) {
        if (!(scratch.masses[i] > 0)) continue;
        found = i;
        start = before;
        if ((before += scratch.masses[i]) > target) break;
    }
    int id = -1;
    for (int i = found * STATS_BLOCK, end = std::min(i + STATS_BLOCK, row.n);
         found >= 0 && i < end && !(start > target); i += LANES) {
        float mine[LANES];
        vf v = weight(cleaned(row.x, i, row.n), top, scale);
        store(mine, v);
        each_bit(bits(v > 0.f), [&](int l) {
            if (start > target) return;
            id = i + l;
            start += mine[l];
        });
    }
    return id;
}

int Distribution::draw_kept(double u, const Filter& filter) const {
    bool of_total = filter.needs_total(row.n), of_first = filter.top_p < 1.f && !of_total;
    double wanted = of_total ? filter.top_p * total : INFINITY;
    // ---- gather candidates: start with the most likely ids, which nearly always suffice
    float lowest = !of_first && filter.min_p > 0
                       ? std::max(MIN_POWER, std::log2(filter.min_p) - .01f)
                       : MIN_POWER;
    for (float level : {-8.f, -12.f, -16.f, MIN_POWER}) {
        float from = std::max(level, lowest);
        double mass = gather(from);
        if (from == lowest || int64_t(scratch.found.size()) >= filter.k ||
            mass > wanted * (1 + 1e-6))
            break;
    }
    if (scratch.found.empty()) return -1;
    if (of_first) wanted = filter.top_p * cut(filter.k, INFINITY).mass;
    Cut kept = cut(filter.k, wanted);
    auto keeps = [&](const Candidate& c) {
        int bin = bin_of(c);
        return c.p >= filter.min_p &&
               (bin < kept.bin || (bin == kept.bin && kept.some && !(kept.last < c)));
    };  // the largest p is exactly 1
    double sum = 0;
    for (const Candidate& c : scratch.found) sum += keeps(c) ? c.p : 0;
    double target = u * sum, before = 0;
    int id = -1;
    for (const Candidate& c : scratch.found) {
        if (!keeps(c)) continue;
        id = c.id;
        if ((before += c.p) > target) break;
    }
    return id;
}

// Collects the ids whose exponent is at least `least`, by rising id; returns their mass.
double Distribution::gather(float least) const {
    auto& found = scratch.found;
    found.clear();
    double mass = 0;
    auto add = [&](vf x, uint32_t which, auto id_of) {
        vf v = power(x, top, scale), p = weight_of(v);
        float xs[LANES], ps[LANES];
        store(xs, x);
        store(ps, p);
        each_bit(which & bits((v >= splat(least)) & (v > MIN_POWER)),
                 [&](int l) { found.push_back({xs[l], ps[l], id_of(l)}), mass += ps[l]; });
    };
    if (!row.x) {
        for (const Candidate& c : scratch.kept) add(splat(c.x), 1, [&](int) { return c.id; });
        return mass;
    }
    // slightly below the bound, because the bound and the exponents are rounded
    vf low = splat(top + (least - .01f) / scale);
    auto look = [&](int i) {
        vf x = part(row.x, i, row.n, -INFINITY);
        if (any(x >= low)) add(cleaned(x), ~0u, [&](int l) { return i + l; });
    };
    for (int g = 0; g < row.stats.num_blocks; g += LANES)
        each_bit(bits(load<vf>(row.stats.tops + g) >= low), [&](int l) {
            for (int i = (g + l) * STATS_BLOCK, end = std::min(i + STATS_BLOCK, row.n); i < end;
                 i += LANES)
                look(i);
        });
    return mass;
}

void Distribution::most_likely(int count, int32_t* ids, float* logprobs) const {
    auto& heap = scratch.found;  // the front is the least likely of the best
    count = std::min(count, row.n);
    if (!row.x) {
        heap = scratch.kept;
        std::make_heap(heap.begin(), heap.end());
    } else
        heap.clear();
    for (int block = 0; row.x && block < row.stats.num_blocks && count > 0; block++) {
        bool full = int(heap.size()) == count;
        if (full && !(row.stats.tops[block] > heap.front().x)) continue;
        for (int i = block * STATS_BLOCK, end = std::min(i + STATS_BLOCK, row.n); i < end; i++) {
            Candidate mine{cleaned(row.x[i]), 0, i};
            if (full && !(mine < heap.front())) continue;
            if (full) {
                std::pop_heap(heap.begin(), heap.end());
                heap.pop_back();
            }
            heap.push_back(mine);
            std::push_heap(heap.begin(), heap.end());
            full = int(heap.size()) == count;
        }
    }
    std::sort_heap(heap.begin(), heap.end());
    int found = std::min(count, int(heap.size()));
    for (int i = 0; i < found; i++) {
        ids[i] = heap[i].id;
        logprobs[i] = logprob_of(heap[i].x);
    }
    // too few possible ids were kept: the rest are equal to the smallest
    for (int id = 0; found < count; id++) {
        if (std::any_of(heap.begin(), heap.end(), [&](const Candidate& c) { return c.id == id; }))
            continue;
        ids[found] = id;
        logprobs[found++] = -INFINITY;
    }
}
