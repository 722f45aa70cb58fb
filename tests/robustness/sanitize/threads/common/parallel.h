// Stands before the kernels' own header in a build under the thread sanitizer, which does not know OpenMP's locks and
// would report each of them: the kernels' ranges run on threads of the standard library, all of whose meetings it sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace lightconv {

// On several threads however little there is to do: a grain is how much pays, not how much is safe.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t, int, const F& f) {
  constexpr int64_t kThreads = 4;
  const int64_t total = std::max<int64_t>(end - begin, 0), count = std::min(kThreads, total);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    threads.emplace_back([&f, begin, total, count, i] { f(begin + total * i / count, begin + total * (i + 1) / count); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lightconv
