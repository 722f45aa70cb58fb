// One mistake of each kind, to see that the sanitizers report it in a library that Python loads.

#include <cstdint>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <common/parallel.h>
#endif

namespace {

template <class F>
void on_ranges(int64_t n, const F& f) {
#ifdef __SANITIZE_THREAD__
  lightconv::parallel_for(0, n, 1, 4, f);
#else
  f(int64_t(0), n);
#endif
}

}  // namespace

extern "C" float read_beyond_the_end(int64_t n) {
  const std::vector<float> row(n);
  return row.data()[n];
}

extern "C" int shift_too_far(int64_t by) { return 1 << by; }

// Every range adds to one sum.
extern "C" int64_t add_up_without_a_lock(int64_t n) {
  int64_t sum = 0;
  on_ranges(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  return sum;
}

extern "C" int64_t write_each_its_own(int64_t n) {
  std::vector<int64_t> squares(n);
  on_ranges(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) squares[i] = i * i;
  });
  return squares.back();
}
