// The LM head, the last op of a program. Its tiles stay in thread-local memory that fits the
// caches; only what the sampler needs is kept.
#pragma once
#include "../sample/gather.h"

class Head {
public:
    // Checks that op and the rows to sample; empty if there is no such product or all rows are
    // needed whole. `buf` gets an entry per thread.
    void begin(const std::vector<OpRecord>& ops, Step& s, std::vector<void*>& buf);
    bool is(const Op& op) const { return &op == head; }
    int units(const Step& s) const;  // units of adjacent tiles
    void unit(const Kernel& kernel, const Step& s, int u, void* scratch, int thread);
    const LogitsCollector* gathered() const { return head ? &gather : nullptr; }

private:
    const Linear* head = nullptr;
    int shared = 0;            // entries of `buf` that are not ours
    void** outs = nullptr;     // ours
    int width = 0;             // columns of a unit
    int64_t unit_floats = 0;   // floats of a unit
    std::vector<float> tiles;  // [threads][unit_floats]
    LogitsCollector gather;
};
