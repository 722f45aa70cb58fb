// A few threads that work together for the duration of a search.
#pragma once

#include <atomic>
#include <condition_variable>
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
// exception is rethrown. Who waits does so actively for a while, because the next piece of work usually comes within
// microseconds, and then sleeps: where other programs use the cores too, a thread that waits would keep its own team from
// working.
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
    busy_ = static_cast<int>(threads_.size());
    ++round_;
    wake();
    guarded(work, 0);
    wait([this] { return busy_ == 0; });
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
    ++round_;
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  template <class Condition>
  void wait(Condition met) {
    constexpr int kActive = 4096;
    for (int i = 0; i < kActive; ++i) {
      if (met()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(sleeping_);
    ++sleepers_;
    wake_.wait(lock, met);
    --sleepers_;
  }

  // After a change of what is waited for. All these atomics are sequentially consistent: either this sees who falls
  // asleep, or he sees the change.
  void wake() {
    if (sleepers_ == 0) return;
    { const std::lock_guard<std::mutex> lock(sleeping_); }
    wake_.notify_all();
  }

  void serve(int member) {
    for (uint64_t seen = 0;;) {
      wait([&] { return round_ != seen; });
      ++seen;
      const auto* work = work_;
      if (!work) return;
      guarded(*work, member);
      if (--busy_ == 0) wake();
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
  std::atomic<int> busy_{0}, sleepers_{0};
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::mutex failing_;
  std::exception_ptr failure_;
};

}  // namespace lightconv::decoding
