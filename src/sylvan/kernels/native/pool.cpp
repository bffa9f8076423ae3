#include "pool.h"
#include "amx.h"
#include <algorithm>
#include <cstdlib>

namespace {
#if defined(__x86_64__)
void relax() { __builtin_ia32_pause(); }
#else
void relax() { std::this_thread::yield(); }
#endif
}  // namespace

Pool& Pool::shared() {
    static Pool* pool = [] {
        auto* p = new Pool;
        p->resize(1);
        return p;
    }();
    return *pool;
}

// Whether somebody else wants this core: perhaps the very thread that is awaited. Who sleeps then is woken where there is
// room, while two that spin on one core would take turns until the system finds time to look.
bool Pool::is_crowded() {
    auto begun = std::chrono::steady_clock::now();
    std::this_thread::yield();
    return std::chrono::steady_clock::now() - begun > CROWDED;
}

void Pool::await_change(std::atomic<int>& value, int old) {
    for (int i = 1; i <= SPINS; i++, relax()) {
        if (value.load(std::memory_order_acquire) != old) return;
        if (i % LOOK_EVERY == 0 && is_crowded()) break;
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::barrier() {
    if (count == 1) return;
    int t = turn.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
        arrived.store(0, std::memory_order_relaxed);
        turn.store(t + 1, std::memory_order_release);
        turn.notify_all();  // no system call when nobody sleeps
    } else await_change(turn, t);
}

void Pool::wake() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
}

void Pool::work(int thread, int seen) {
    configure_tiles();
    for (;;) {
        await_change(epoch, seen);
        seen++;
        if (stop) return;
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
    configure_tiles();
    if (count > 1) wake();
    f(a, 0);
    barrier();
    release_tiles();
}
