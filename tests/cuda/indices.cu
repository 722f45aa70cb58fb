// convolution/arithmetic.cuh's indices and masks alone, for tensors that could not be in memory.
//
//     indices BATCH HEADS KERNEL_SIZE SEED DROP_BELOW T B H
//
// prints the row-major index of the first weight of (t, b, h), and the dropout factor of each of its K weights.

#include <cstdio>
#include <cstdlib>

#include "convolution/arithmetic.cuh"

int main(int, char** argument) {
  const auto number = [&](int i) { return std::strtoull(argument[i], nullptr, 10); };
  lightconv::ConvParams p;
  p.dynamic = true;
  p.batch = static_cast<int64_t>(number(1));
  p.heads = static_cast<int>(number(2));
  p.kernel_size = static_cast<int>(number(3));
  p.drop_below = number(5);
  p.keep_scale = 1;
  const uint64_t flat = lightconv::flat_index(p, static_cast<int64_t>(number(6)), static_cast<int64_t>(number(7)),
                                              static_cast<int>(number(8)));
  std::printf("%llu", static_cast<unsigned long long>(flat));
  for (uint64_t at = flat; at < flat + p.kernel_size; ++at) {
    const float4 four = lightconv::dropout_factors(p, at / 4, number(4));
    std::printf(" %g", static_cast<double>(lightconv::component(four, static_cast<int>(at % 4))));
  }
  std::printf("\n");
}
