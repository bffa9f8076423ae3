#include "pool.h"
#include "amx.h"
#include <algorithm>
#include <cstdlib>
#if defined(__linux__)
#include <sched.h>
#endif

namespace {
#if defined(__x86_64__)
void relax() { __builtin_ia32_pause(); }
#else
void relax() { std::this_thread::yield(); }
#endif

thread_local int self = 0;  // index of this thread in the job; 0: the caller

#if defined(__linux__)
thread_local cpu_set_t home;  // cores that this thread may use

int this_core() { return sched_getcpu(); }

void keep_off(int core) {
    cpu_set_t others = home;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
}

void remember_cores() { sched_getaffinity(0, sizeof home, &home); }
#else
int this_core() { return -1; }
void keep_off(int) {}
void remember_cores() {}
#endif
}  // namespace

static Pool* new_pool() {
    auto* pool = new Pool;
    pool->resize(1);
    return pool;
}

Pool& Pool::shared() {
    static Pool* pool = new_pool();
    return *pool;
}

Pool& Pool::background() {
    static Pool* pool = new_pool();
    return *pool;
}

// Whether this thread shares a core with another thread of the job, which cannot run while this one
// spins. Helpers then leave the caller's core, and the caller sleeps. The operating system would
// take milliseconds to rebalance, above all if background work occupies the other core, which the
// helper may preempt.
bool Pool::shares_core() {
    int core = this_core();
    if (core < 0) return false;
    if (self) {
        if (core == cores[0].load(std::memory_order_relaxed)) {
            keep_off(core);
            core = this_core();
        }
        cores[self].store(core, std::memory_order_relaxed);
        return false;
    }
    cores[0].store(core, std::memory_order_relaxed);
    for (int t = 1; t < std::min(count, MAX_TRACKED); t++)
        if (cores[t].load(std::memory_order_relaxed) == core) return true;
    return false;
}

void Pool::await_change(std::atomic<int>& value, int old) {
    for (int i = 1; i <= SPINS; i++, relax()) {
        if (value.load(std::memory_order_acquire) != old) return;
        if (i % LOOK_EVERY == 0 && shares_core()) break;
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::barrier() {
    if (count == 1) return;
    int t = generation.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
        arrived.store(0, std::memory_order_relaxed);
        generation.store(t + 1, std::memory_order_release);
        generation.notify_all();  // no system call if no thread sleeps
    } else
        await_change(generation, t);
}

void Pool::wake() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
}

void Pool::work(int thread, int seen) {
    configure_tiles();
    remember_cores();
    self = std::min(thread, MAX_TRACKED - 1);
    for (;;) {
        await_change(epoch, seen);
        seen++;
        if (stop) return;
        shares_core();
        job(arg, thread);
        barrier();
    }
}

void Pool::resize(int wanted) {
    std::lock_guard lock(busy);
    stop = true;
    wake();
    for (auto& t : threads) t.join();
    threads.clear();
    stop = false;
    count = std::max(1, wanted);
    while (int(memory.size()) < count) memory.push_back(std::aligned_alloc(64, SCRATCH_BYTES));
    for (int id = 1; id < count; id++) threads.emplace_back(&Pool::work, this, id, epoch.load());
}

void Pool::run(void (*f)(void*, int), void* a) {
    job = f;
    arg = a;
    cores[0].store(this_core(), std::memory_order_relaxed);
    configure_tiles();
    if (count > 1) wake();
    f(a, 0);
    barrier();
    release_tiles();
}
