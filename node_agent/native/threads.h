// A few threads that run one function together, in phases that share out numbered items.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace decodefleet {

class Threads {
  public:
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // Runs `work(thread)` on every thread, the caller's included, and returns when all are done.
    void run(const std::function<void(int)>& work);

    // Within `run`: calls f(item) once for each item of 0 … items - 1, on whichever thread is free; returns when all are done.
    // Every thread must come to the same phases in the same order. `run`: items that a thread takes at once.
    template <class F>
    void phase(int items, int run, F&& f) {
        if (count_ == 1) {
            for (int item = 0; item < items; item++) f(item);
            return;
        }
        for (int first; (first = next_.fetch_add(run, std::memory_order_relaxed)) < items;) {
            for (int item = first; item < items && item < first + run; item++) f(item);
        }
        barrier();
    }

    template <class F>
    void phase(int items, F&& f) {
        phase(items, 1, f);
    }

    // Small items that a thread takes at once.
    int share(int items) const { return std::clamp(items / (4 * count_), 1, 16); }

  private:
    void barrier();
    void serve(int thread);

    const int count_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<std::thread> threads_;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    std::atomic<int> sleepers_{0};
};

// Denormal numbers count as zero on this thread while it lives: they are slow, and mean nothing here.
class FlushDenormals {
  public:
    FlushDenormals();
    ~FlushDenormals();

  private:
    uint64_t before_ = 0;
};

}  // namespace decodefleet
