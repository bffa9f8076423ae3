// The LM head, the last op of a program, fused with the collection of logits. Its tiles stay in
// thread-local memory that fits the caches; only the logits that the sampler needs are kept.
#pragma once
#include "../sample/logits_collector.h"

class Head {
public:
    // Checks the last op and the rows to sample. Fuses nothing if the op is no suitable linear
    // layer, or if all rows need all of their logits. Adds an entry per thread to `buf`.
    void begin(const std::vector<OpRecord>& ops, Step& s, std::vector<void*>& buf);
    bool is(const Op& op) const { return &op == head; }
    int units(const Step& s) const;  // units of adjacent tiles
    void unit(const Kernel& kernel, const Step& s, int u, void* scratch, int thread);
    const LogitsCollector* collected() const { return head ? &collector : nullptr; }

private:
    const Linear* head = nullptr;
    int shared = 0;            // entries of `buf` before those of the threads
    void** outs = nullptr;     // the entries of the threads
    int width = 0;             // columns of a unit
    int64_t unit_floats = 0;   // floats of a unit
    std::vector<float> tiles;  // [threads][unit_floats]
    LogitsCollector collector;
};
