// The product that makes the logits to sample, the last op of a program that does anything. Its tiles go to memory of their thread, which the
// caches hold, and only what the sampler wants of them further.
#pragma once
#include "../sample/gather.h"

class Head {
  public:
    // Looks at that op and at what will be sampled; has no op if none is such a product or all rows are wanted whole.
    // `buf` gets an entry for each thread.
    void begin(const std::vector<OpRecord>& ops, Step& s, std::vector<void*>& buf);
    bool is(const Op& op) const { return &op == head; }
    int units(const Step& s) const;  // of tiles side by side
    void unit(const Kernel& kernel, const Step& s, int u, void* scratch, int thread);
    const Gather* gathered() const { return head ? &gather : nullptr; }

  private:
    const Linear* head = nullptr;
    int shared = 0;            // entries of `buf` that are not ours
    void** outs = nullptr;     // ours
    int width = 0;             // columns of a unit
    int64_t room = 0;          // floats of a unit
    std::vector<float> tiles;  // [threads][room]
    Gather gather;
};
