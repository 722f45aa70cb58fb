// Ranges of work on OpenMP threads. libgomp is the one that torch has already loaded, so its threads are shared.
//
// tests/robustness/sanitize/threads has another parallel.h, for the thread sanitizer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace lightconv {

// Calls f(from, to) for ranges of about `grain` items or more that cover begin … end − 1, on up to `threads` threads.
// A thread takes the next range when it has finished one, because sentences differ in length. After an exception no
// further range starts, and the first exception is rethrown.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, int threads, const F& f) {
  const int64_t total = end - begin;
  if (total <= 0) return;
  const int wanted = int(std::min<int64_t>(threads, (total + grain - 1) / grain));
  if (wanted <= 1) return f(begin, end);
  constexpr int64_t kRanges = 8;  // per thread
  const int64_t step = std::max(grain, (total + kRanges * wanted - 1) / (kRanges * wanted));
  std::atomic<int64_t> next{begin};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
#pragma omp parallel num_threads(wanted)
  {
    try {
      for (int64_t from; !failed && (from = next.fetch_add(step)) < end;) f(from, std::min(from + step, end));
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lightconv
