#include "threads.h"

#include <chrono>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace decodefleet {

namespace {

constexpr auto SPIN = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

Threads::Threads(int count) : count_(count) {
    for (int thread = 1; thread < count; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Threads::~Threads() {
    work_ = nullptr;
    if (count_ > 1) barrier();
    for (auto& thread : threads_) thread.join();
}

void Threads::run(const std::function<void(int)>& work) {
    FlushDenormals flush;
    if (count_ == 1) return work(0);
    work_ = &work;
    barrier();
    work(0);
    barrier();
}

void Threads::serve(int thread) {
    FlushDenormals flush;
    while (true) {
        barrier();
        if (!work_) return;
        (*work_)(thread);
        barrier();
    }
}

void Threads::barrier() {
    uint32_t now = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        generation_.store(now + 1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) wake_all(generation_);
        return;
    }
    auto until = std::chrono::steady_clock::now() + SPIN;
    for (int turn = 1; generation_.load(std::memory_order_acquire) == now; turn++) {
        pause();
        if (turn % 64) continue;
        std::this_thread::yield();  // to whoever needs this core, which may be the thread that is waited for
        if (std::chrono::steady_clock::now() < until) continue;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (generation_.load(std::memory_order_seq_cst) == now) sleep_while(generation_, now);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
}

FlushDenormals::FlushDenormals() {
#if defined(__x86_64__)
    before_ = _mm_getcsr();
    _mm_setcsr(static_cast<unsigned>(before_) | 0x8040);  // FTZ | DAZ
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(before_));
#endif
}

}  // namespace decodefleet
