// cpu/common/philox.h alone, for the dropout factors of weights so far on in a tensor that it could not be in memory.

#include <memory>

#include "common/philox.h"

// factors[i] of the weights first … first + n − 1.
extern "C" void factors_at(uint64_t seed, uint64_t first, int64_t n, uint64_t threshold, double scale, double* factors) {
  std::unique_ptr<uint32_t[]> words(new uint32_t[n + 64]);
  const int64_t at = lightconv::philox_words(seed, first, n, words.get());
  lightconv::dropout_factors(lightconv::Dropout{seed, threshold, scale}, words.get() + at, n, factors);
}
