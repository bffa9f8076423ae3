// A small thread pool: spins for a bounded time between the ops of a step, sleeps between steps.
#pragma once
#include "program.h"
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
public:
    // one per process and library; never destroyed, because threads may outlive static destructors
    static Pool& shared();
    // for programs that run concurrently with steps; inherits the priority of the first resizer
    static Pool& background();

    std::mutex busy;  // held while a program runs: one at a time
    int size() const { return count; }
    void* scratch(int thread) { return memory[thread]; }

    void resize(int threads);
    // job(arg, thread) on every thread, the caller's being 0
    void run(void (*job)(void*, int), void* arg);
    void barrier();  // called by all threads of a job

private:
    // at most some 200 us: longer than the gaps in a step, far shorter than an idle moment
    static constexpr int SPINS = 4000;
    static constexpr int LOOK_EVERY = 200;   // pauses: some 10 us
    static constexpr int MAX_TRACKED = 256;  // threads whose cores are tracked
    alignas(64) std::atomic<int> epoch{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};
    std::vector<std::thread> threads;
    std::vector<void*> memory;
    bool stop = false;
    int count = 0;
    void (*job)(void*, int) = nullptr;
    void* arg = nullptr;

    void wake();
    void work(int thread, int seen);
    std::atomic<int> cores[MAX_TRACKED] = {};  // last known cores of a job's threads

    bool shares_core();
    void await_change(std::atomic<int>& value, int old);
};
