// Samples one token per row from final logits. The definition is that of sylvan.runtime.sampling.
// Rows are independent, and one thread processes a row in a fixed order, so a draw depends only on
// its own logits and parameters.
#include "sample.h"
#include "../native/pool.h"
#include "logits_collector.h"
#include <algorithm>

namespace {

void put_part(float* x, int i, int n, vf v) {
    memcpy(x + i, &v, std::min(LANES, n - i) * sizeof(float));
}

int largest_logit(const float* x, int n) {  // ties: the lowest id; NaN never wins
    vf tops = splat(-INFINITY);
    vi at = lanes();
    for (int i = 0; i < n; i += LANES) {
        vf v = part(x, i, n, -INFINITY);
        vi better = v > tops;
        tops = select(better, v, tops);
        at = select(better, lanes() + i, at);
    }
    float top = largest(tops);
    int best = n;
    for (int l = 0; l < LANES; l++)
        if (tops[l] == top) best = std::min(best, int(at[l]));
    return best < n ? best : 0;
}

void write_logprobs(const Distribution& from, int n, int id, int top, const int32_t* chosen,
                    int num_chosen, const Logprobs& to, int row) {
    to.own[row] = from.logprob(id);
    if (top)
        from.most_likely(std::min(top, n), to.top_ids + int64_t(row) * to.top_stride,
                         to.top + int64_t(row) * to.top_stride);
    for (int i = 0; i < num_chosen; i++)
        to.chosen[int64_t(row) * to.chosen_stride + i] =
            from.logprob(std::clamp(chosen[i], 0, n - 1));
}

class Row {
public:
    Row(const Sample& s, int row, SamplerScratch& scratch)
        : s(s), t(*s.params), row(row), slot(s.slots[row]), n(s.vocab),
          x(s.logits + row * s.stride), scratch(scratch) {}

    void sample() {
        edit_logits();
        if (t.greedy[slot] && !wants_logprobs()) {
            int best = largest_logit(x, n);
            return choose(best, x[best] > -INFINITY);
        }
        choose_from({x, n, scratch.stats.of(x, n, t.temperature[slot]), t.temperature[slot]});
    }

    void sample(const LogitsCollector& collector) {
        const RowNeeds& needs = collector.needs_of_row(row);
        if (needs.kind == RowNeeds::WHOLE) return sample();
        const Best& best = collector.best(row);
        if (needs.kind == RowNeeds::LARGEST) return choose(best.id, best.id != NO_LOGIT);
        collector.kept(row, scratch);
        choose_from({nullptr, n, collector.stats(row, scratch), t.temperature[slot]});
    }

private:
    const Sample& s;
    const SampleSlots& t;
    int row, slot, n;
    float* x;
    SamplerScratch& scratch;

    template <class T> const T* list(const int64_t* addresses) const {
        return reinterpret_cast<const T*>(addresses[slot]);
    }
    bool wants_logprobs() const { return s.logprobs.own && t.has_logprobs[slot]; }

    void choose(int id, bool possible) {
        s.ids[row] = possible ? id : 0;
        s.failed[row] = !possible;
    }

    void choose_from(const RowLogits& logits) {
        Distribution from(logits, scratch);
        if (!from.possible()) return choose(0, false);
        int id = t.greedy[slot]
                     ? from.likeliest()
                     : from.draw(uniform(t.seed[slot], t.sample[slot], s.positions[row]), filter());
        choose(id, true);
        if (wants_logprobs())
            write_logprobs(from, n, id, t.top[slot], list<int32_t>(t.chosen_ids),
                           t.num_chosen[slot], s.logprobs, row);
    }

    Filter filter() const { return {t.top_k[slot], t.top_p[slot], t.min_p[slot]}; }

    void edit_logits() {  // in the order of sylvan.runtime.sampling
        if (t.has_penalty[slot]) penalise(t.counts + t.counts_row[slot] * n);
        if (s.positions[row] < t.min_position[slot])
            for (int i = 0; i < t.num_stops[slot]; i++) x[list<int32_t>(t.stops)[i]] = -INFINITY;
        if (s.mask_of && s.mask_of[row] >= 0) mask(s.masks + s.mask_of[row] * s.mask_stride);
        for (int i = 0; i < t.num_bias[slot]; i++)
            x[list<int32_t>(t.bias_ids)[i]] += list<float>(t.bias)[i];
    }

    void penalise(const float* counts) {
        vf frequency = splat(t.frequency[slot]), presence = splat(t.presence[slot]);
        vf repetition = splat(t.repetition[slot]);
        for (int i = 0; i < n; i += LANES) {
            vf count = part(counts, i, n, 0.f);
            if (!any(count > 0.f)) continue;
            vf old = part(x, i, n, 0.f), v = old - frequency * count - presence;
            v = select(v > 0.f, v / repetition, v * repetition);
            put_part(x, i, n, select(count > 0.f, v, old));
        }
    }

    void mask(const int32_t* bits) {
        for (int i = 0; i < n; i += LANES) {
            uint32_t half = uint32_t(bits[i >> 5]) >> (i & 31) & 0xffff;
            if (half == 0xffff) continue;
            vi keep = (((vi{} + int32_t(half)) >> lanes()) & 1) == 1;
            put_part(x, i, n, select(keep, part(x, i, n, 0.f), splat(-INFINITY)));
        }
    }
};

struct SampleJob {
    const Sample* sample;
    std::atomic<int> next;
};

struct LogprobJob {
    const ForcedTokens* given;
    std::atomic<int> next;
};

void write_forced_logprobs(void* arg, int) {
    auto& d = *static_cast<LogprobJob*>(arg);
    const ForcedTokens& g = *d.given;
    thread_local SamplerScratch scratch;
    for (int r; (r = d.next.fetch_add(1, std::memory_order_relaxed)) < g.rows;) {
        const float* x = g.logits + r * g.stride;
        Distribution from({x, g.vocab, scratch.stats.of(x, g.vocab, 1.f), 1.f, true}, scratch);
        write_logprobs(from, g.vocab, g.ids[r], g.top, g.chosen_ids, g.num_chosen, g.logprobs, r);
    }
}

void run_rows(void (*job)(void*, int), void* arg, int rows) {
    if (rows <= 1) return job(arg, 0);  // cheaper than waking the helpers
    Pool& pool = Pool::shared();
    std::lock_guard lock(pool.busy);
    pool.run(job, arg);
}

}  // namespace

void sample_rows(const Sample& sample, std::atomic<int>& next, const LogitsCollector* collector) {
    thread_local SamplerScratch scratch;
    for (int r; (r = next.fetch_add(1, std::memory_order_relaxed)) < sample.rows;) {
        Row mine(sample, r, scratch);
        if (collector)
            mine.sample(*collector);
        else
            mine.sample();
    }
}

int count_failed(const Sample& sample) {
    return int(std::count(sample.failed, sample.failed + sample.rows, 1));
}

SYLVAN_API int sylvan_sample(const Sample* sample) {  // returns the number of failed rows
    SampleJob d{sample, 0};
    run_rows(
        [](void* arg, int) {
            auto& mine = *static_cast<SampleJob*>(arg);
            sample_rows(*mine.sample, mine.next);
        },
        &d, sample->rows);
    return count_failed(*sample);
}

SYLVAN_API void sylvan_logprobs(const ForcedTokens* given) {
    LogprobJob d{given, 0};
    run_rows(write_forced_logprobs, &d, given->rows);
}
