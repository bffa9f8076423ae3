// The product that makes the logits to sample, the last op of a program. Of rows whose token is that of their largest logit
// it keeps no more than that: its tiles go to memory of their thread, which the caches hold, and only their largest further.
#pragma once
#include "../native/kernel.h"
#include <vector>

class Head {
  public:
    // Looks at the last op and at what will be sampled; has no op if none is such a product or all rows are wanted whole.
    // `buf` gets an entry for each thread.
    void begin(const std::vector<Op>& ops, Step& s, std::vector<void*>& buf);
    bool is(const Op& op) const { return &op == head; }
    void tile(const Kernel& kernel, const Step& s, int t, void* scratch, int thread);
    const Best* best() const { return head ? rows.data() : nullptr; }  // of each row

  private:
    const Op* head = nullptr;
    int shared = 0;            // entries of `buf` that are not ours
    void** outs = nullptr;     // ours
    int64_t room = 0;          // floats of a tile
    std::vector<float> tiles;  // [threads][room]
    std::vector<Best> rows;
};
