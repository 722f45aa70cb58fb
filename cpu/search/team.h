// A few threads that work together for the duration of a search.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace lightconv::decoding {

// run(f) calls f(0) … f(size − 1), with f(0) on the calling thread, and returns when all have returned. The first
// exception is rethrown. The other threads wait actively for a while, because the next piece of work usually comes
// within microseconds, and then yield.
class Team {
 public:
  // Throws std::runtime_error if the system cannot start that many threads.
  explicit Team(int size) {
    try {
      for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { serve(member); });
    } catch (const std::system_error& error) {
      dismiss();
      throw std::runtime_error("cannot start " + std::to_string(size) + " threads: " + error.what());
    }
  }
  ~Team() { dismiss(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  void run(const std::function<void(int)>& work) {
    if (threads_.empty()) return work(0);
    work_ = &work;
    busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    guarded(work, 0);
    wait([this] { return busy_.load(std::memory_order_acquire) == 0; });
    if (failure_) {
      const std::exception_ptr failure = failure_;
      failure_ = nullptr;
      std::rethrow_exception(failure);
    }
  }

  // Divides 0 … count − 1 into one range per member, and calls f(first, last) for each.
  template <class F>
  void share(int64_t count, F f) {
    const int64_t members = size();
    run([&](int member) {
      const int64_t first = count * member / members, last = count * (member + 1) / members;
      if (first < last) f(first, last);
    });
  }

 private:
  void dismiss() {
    work_ = nullptr;
    round_.fetch_add(1, std::memory_order_release);
    for (std::thread& thread : threads_) thread.join();
  }

  template <class Condition>
  static void wait(Condition met) {
    constexpr int kActive = 4096;
    for (int i = 0; !met(); ++i) {
      if (i >= kActive) std::this_thread::yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  }

  void serve(int member) {
    for (uint64_t seen = 0;;) {
      wait([&] { return round_.load(std::memory_order_acquire) != seen; });
      ++seen;
      const auto* work = work_;
      if (!work) return;
      guarded(*work, member);
      busy_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void guarded(const std::function<void(int)>& work, int member) {
    try {
      work(member);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> busy_{0};
  std::mutex failing_;
  std::exception_ptr failure_;
};

}  // namespace lightconv::decoding
