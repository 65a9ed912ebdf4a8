// The number of the last message in memory that several processes share. Whoever waits for it looks for a while, then
// sleeps until it is told, on Linux; elsewhere it gives its core to others and looks again.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using Number = std::atomic<int32_t>;
static_assert(Number::is_always_lock_free);

namespace {
constexpr int LOOKS = 64;  // between two looks at the clock

bool has_come(const Number* at, int32_t wanted) {
    return static_cast<int32_t>(static_cast<uint32_t>(at->load(std::memory_order_acquire)) - wanted) >= 0;
}

void sleep(const Number* at, int32_t wanted, int64_t most_us) {
#ifdef __linux__
    const int32_t now = at->load(std::memory_order_acquire);
    const timespec limit{most_us / 1000000, most_us % 1000000 * 1000};
    if (!has_come(at, wanted)) syscall(SYS_futex, at, FUTEX_WAIT, now, &limit, nullptr, 0);
#else
    std::this_thread::yield();
#endif
}
}  // namespace

extern "C" void tell(Number* at, int32_t number) {
    at->store(number, std::memory_order_release);
#ifdef __linux__
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Whether the number has come within so many microseconds, of which the first look_us are spent looking.
extern "C" int wait_for(const Number* at, int32_t wanted, int64_t look_us, int64_t most_us) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (;;) {
        for (int i = 0; i < LOOKS; ++i)
            if (has_come(at, wanted)) return 1;
        const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
        if (us >= most_us) return 0;
        if (us >= look_us) sleep(at, wanted, most_us - us);
    }
}
