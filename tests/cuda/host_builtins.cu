// Small kernels that watch over cuda_on_host.h itself: what it must compute, and what it must complain about.
//
//     host_builtins <name>: runs one of them; prints what test_host_builtins.py expects, or ends in the complaint.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda_on_host.h"

namespace {

using lightconv_host::Order;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("wrong: %s\n", what);
    std::exit(1);
  }
}

// Results of a program that ought not to depend on the order in which threads run.
template <class Run>
void compare_orders(Run run) {
  lightconv_host::order = Order::ascending;
  const std::vector<float> first = run();
  lightconv_host::order = Order::descending;
  const std::vector<float> second = run();
  std::puts(std::memcmp(first.data(), second.data(), first.size() * 4) ? "differ" : "same");
}

// ------------------------------------------------------------------------------------------------ values

__global__ void shuffles(int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, mine = lane * lane;
  int* mine_out = out + threadIdx.x * 8;
  mine_out[0] = __shfl_sync(0xffffffffu, mine, 5);
  mine_out[1] = __shfl_xor_sync(0xffffffffu, mine, 3);
  mine_out[2] = __shfl_up_sync(0xffffffffu, mine, 2);
  mine_out[3] = __shfl_down_sync(0xffffffffu, mine, 4, 8);
  mine_out[4] = __shfl_sync(0xffffffffu, mine, 1, 8);
  mine_out[5] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  mine_out[6] = lane < 16 ? __shfl_xor_sync(0x0000ffffu, mine, 1) : -1;  // half a warp goes alone
  mine_out[7] = __any_sync(0xffffffffu, lane == 7) + 2 * __all_sync(0xffffffffu, lane < 31);
}

void run_shuffles() {
  std::vector<int> out(64 * 8);
  LIGHTCONV_LAUNCH(shuffles, 1, 64, 0, nullptr, out.data());
  unsigned ballot = 0;
  for (int i = 0; i < 32; i += 3) ballot |= 1u << i;
  for (int t = 0; t < 64; ++t) {
    const int l = t % 32, *got = out.data() + t * 8;
    auto square = [](int n) { return n * n; };
    check(got[0] == 25, "__shfl_sync");
    check(got[1] == square(l ^ 3), "__shfl_xor_sync");
    check(got[2] == square(l < 2 ? l : l - 2), "__shfl_up_sync");
    check(got[3] == square(l % 8 < 4 ? l + 4 : l), "__shfl_down_sync with a width");
    check(got[4] == square(l / 8 * 8 + 1), "__shfl_sync with a width");
    check(static_cast<unsigned>(got[5]) == ballot, "__ballot_sync");
    check(got[6] == (l < 16 ? square(l ^ 1) : -1), "__shfl_xor_sync of half a warp");
    check(got[7] == 1, "__any_sync, __all_sync");
  }
  std::puts("right");
}

// A block's sum in shared memory, with all its barriers, over a grid of three dimensions.
__global__ void sums(const float* in, float* out) {
  LIGHTCONV_DYNAMIC_SHARED(float, partial);
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  partial[t] = in[block * count + t];
  __syncthreads();
  for (unsigned half = count / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    __syncthreads();
  }
  if (t == 0) out[block] = partial[0];
}

void run_sums() {
  const dim3 grid(2, 3, 4), block(8, 4, 2);
  std::vector<float> in(24 * 64), out(24);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 71);
  LIGHTCONV_LAUNCH(sums, grid, block, 64 * sizeof(float), nullptr, in.data(), out.data());
  for (std::size_t b = 0; b < 24; ++b) {
    float sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += in[b * 64 + i];
    check(out[b] == sum, "the sum of a block");
  }
  std::puts("right");
}

// A (16×16, rows), B (16×8, stored as `b_by_column` says) and C (16×8), through ldmatrix, as kernels do it.
__global__ void product(const std::uint16_t* a, const std::uint16_t* b, float* c, bool bf16, bool b_by_column) {
  LIGHTCONV_DYNAMIC_SHARED(std::uint16_t, shared);
  std::uint16_t *sa = shared, *sb = shared + 256;
  const int l = static_cast<int>(threadIdx.x);
  for (int i = l; i < 32; i += 32) lightconv_host::cp_async(sa + i * 8, a + i * 8, 16);
  for (int i = l; i < 16; i += 32) lightconv_host::cp_async(sb + i * 8, b + i * 8, 16);
  lightconv_host::cp_async_commit();
  lightconv_host::cp_async_wait(0);
  __syncthreads();
  std::uint32_t fa[4], fb[2];
  lightconv_host::ldmatrix_x4(fa, sa + (l % 16) * 16 + l / 16 * 8, false);
  if (b_by_column)
    lightconv_host::ldmatrix_x2(fb, sb + l % 8 * 16 + l / 8 % 2 * 8, false);
  else
    lightconv_host::ldmatrix_x2(fb, sb + l % 16 * 8, true);
  const int row = l / 4, column = l % 4 * 2;
  float d[4] = {c[row * 8 + column], c[row * 8 + column + 1], c[(row + 8) * 8 + column], c[(row + 8) * 8 + column + 1]};
  lightconv_host::mma_m16n8k16(d, fa, fb, d, bf16);
  for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}

void run_product(bool bf16, bool b_by_column) {
  std::vector<std::uint16_t> a(256), b(128);
  std::vector<float> c(128);
  std::vector<double> want(128);
  unsigned state = 1;
  auto random = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f; };
  auto pack = [&](float v) { return bf16 ? lightconv_host::float_to_bfloat16(v) : lightconv_host::float_to_half(v); };
  auto unpack = [&](std::uint16_t v) {
    return static_cast<double>(bf16 ? lightconv_host::bfloat16_to_float(v) : lightconv_host::half_to_float(v));
  };
  for (auto& v : a) v = pack(random());
  for (auto& v : b) v = pack(random());
  for (auto& v : c) v = random();
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t j = 0; j < 8; ++j) {
      want[i * 8 + j] = static_cast<double>(c[i * 8 + j]);
      for (std::size_t k = 0; k < 16; ++k)
        want[i * 8 + j] += unpack(a[i * 16 + k]) * unpack(b[b_by_column ? j * 16 + k : k * 8 + j]);
    }
  LIGHTCONV_LAUNCH(product, 1, 32, 384 * 2, nullptr, a.data(), b.data(), c.data(), bf16, b_by_column);
  for (std::size_t i = 0; i < 128; ++i) check(std::fabs(static_cast<double>(c[i]) - want[i]) < 1e-5, "the product");
}

void run_products() {
  for (int i = 0; i < 4; ++i) run_product(i & 1, i & 2);
  std::puts("right");
}

void run_limits() {
  auto launched = [](dim3 grid, dim3 block, std::size_t shared) {
    LIGHTCONV_LAUNCH(+[](int) {}, grid, block, shared, nullptr, 0);
    return cudaGetLastError();
  };
  check(launched(1, 1024, 48 * 1024) == cudaSuccess, "the largest block");
  check(launched(1, 1025, 0) == cudaErrorInvalidConfiguration, "too many threads");
  check(launched(1, dim3(1, 1, 65), 0) == cudaErrorInvalidConfiguration, "too many threads in z");
  check(launched(dim3(1, 65536), 1, 0) == cudaErrorInvalidConfiguration, "too many blocks in y");
  check(launched(dim3(1, 1, 65536), 1, 0) == cudaErrorInvalidConfiguration, "too many blocks in z");
  check(launched(0, 1, 0) == cudaErrorInvalidConfiguration, "an empty grid");
  check(launched(1, 1, 48 * 1024 + 1) == cudaErrorInvalidConfiguration, "shared memory that was not asked for");
  check(cudaGetLastError() == cudaSuccess, "an error is told once");
  check(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, 99 * 1024) == cudaSuccess, "99 KB");
  check(cudaFuncSetAttribute(sums, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024) == cudaErrorInvalidValue,
        "more than 99 KB");
  std::puts("right");
}

// Standard input: floats. Standard output: each as half, then as bfloat16; then all 2·65536 values of both, as floats.
void convert() {
  std::vector<std::uint16_t> halves, bfloats;
  for (float value; std::fread(&value, sizeof value, 1, stdin) == 1;) {
    halves.push_back(__float2half_rn(value).x);
    bfloats.push_back(__float2bfloat16_rn(value).x);
  }
  std::fwrite(halves.data(), 2, halves.size(), stdout);
  std::fwrite(bfloats.data(), 2, bfloats.size(), stdout);
  for (int bf16 = 0; bf16 < 2; ++bf16)
    for (unsigned i = 0; i < 65536; ++i) {
      const auto word = static_cast<std::uint16_t>(i);
      const float value = bf16 ? __bfloat162float({word}) : __half2float({word});
      std::fwrite(&value, sizeof value, 1, stdout);
    }
}

// ------------------------------------------------------------------------------------------------ orders

// Each thread reads what its neighbour wrote, in the same warp or across warps.
__global__ void rotate(float* out, int barrier) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  const unsigned t = threadIdx.x;
  shared[t] = static_cast<float>(t);
  if (barrier == 1) __syncthreads();
  if (barrier == 2) __syncwarp();
  out[t] = shared[(t + 1) % blockDim.x];
}

__global__ void read_unwritten(float* out) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  out[threadIdx.x] = fmaxf(shared[threadIdx.x], 1.0f);
}

__global__ void copy_in_flight(const float* in, float* out, int wait) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  lightconv_host::cp_async(shared + threadIdx.x, in + threadIdx.x, 4);
  lightconv_host::cp_async_commit();
  if (wait) lightconv_host::cp_async_wait(0);
  out[threadIdx.x] = shared[threadIdx.x];
}

std::vector<float> rotated(unsigned threads, int barrier) {
  std::vector<float> out(threads);
  LIGHTCONV_LAUNCH(rotate, 1, threads, threads * 4, nullptr, out.data(), barrier);
  return out;
}

std::vector<float> unwritten() {
  std::vector<float> out(32);
  LIGHTCONV_LAUNCH(read_unwritten, 1, 32, 128, nullptr, out.data());
  return out;
}

std::vector<float> copied(int wait) {
  std::vector<float> in(32, 2.5f), out(32);
  LIGHTCONV_LAUNCH(copy_in_flight, 1, 32, 128, nullptr, in.data(), out.data(), wait);
  return out;
}

// ------------------------------------------------------------------------------------------------ complaints

__global__ void write_shared(int at) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  shared[static_cast<int>(threadIdx.x) + at] = 1.0f;
}

__global__ void read_global(const float* in, float* out, int at) {
  out[threadIdx.x] = in[static_cast<int>(threadIdx.x) + at];
}

__global__ void read_vectors(const float* in, float4* out) {
  out[threadIdx.x] = *reinterpret_cast<const float4*>(in + 1);
}

// __expf stays within what CUDA's documentation allows, and is not better than a device's.
void exponentials() {
  float worst = 0.0f;
  bool within = __expf(0.0f) == 1.0f;
  for (float a = -80.0f; a < 80.0f; a += 0.0371f) {
    const double exact = std::exp(static_cast<double>(a));
    const float unit = std::nextafter(static_cast<float>(exact), INFINITY) - static_cast<float>(exact);
    const float error = static_cast<float>(std::fabs(__expf(a) - exact) / unit);
    within = within && error <= 2.5f + 1.173f * std::fabs(a);
    worst = std::max(worst, error);
  }
  std::puts(within && worst > 20.0f ? "right" : "wrong");
}

__global__ void leave_early() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

__global__ void two_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void lane_leaves(int* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

__global__ void wrong_mask(int* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0); }

__global__ void misaligned_copy(const float* in) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  lightconv_host::cp_async(shared, in + 1, 16);
}

__global__ void misaligned_matrix() {
  LIGHTCONV_DYNAMIC_SHARED(std::uint16_t, shared);
  std::uint32_t r[4];
  lightconv_host::ldmatrix_x4(r, shared + 4, false);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<float> in(32), out(128);
  std::vector<int> numbers(64);
  const std::map<std::string, void (*)()> values = {
      {"shuffles", run_shuffles},
      {"sums", run_sums},
      {"products", run_products},
      {"limits", run_limits},
      {"exponentials", exponentials},
      {"convert", convert},
      {"barrier", [] { compare_orders([] { return rotated(64, 1); }); }},
      {"missing barrier", [] { compare_orders([] { return rotated(64, 0); }); }},
      {"warp barrier", [] { compare_orders([] { return rotated(32, 2); }); }},
      {"missing warp barrier", [] { compare_orders([] { return rotated(32, 0); }); }},
      {"warp barrier between warps", [] { compare_orders([] { return rotated(64, 2); }); }},
      {"unwritten shared memory", [] { compare_orders(unwritten); }},
      {"copy", [] { compare_orders([] { return copied(1); }); }},
      {"copy without wait", [] { compare_orders([] { return copied(0); }); }},
  };
  const std::string name = argc > 1 ? argv[1] : "";
  if (const auto found = values.find(name); found != values.end())
    found->second();
  else if (name == "shared overrun")
    LIGHTCONV_LAUNCH(write_shared, 1, 32, 128, nullptr, 1);
  else if (name == "shared underrun")
    LIGHTCONV_LAUNCH(write_shared, 1, 32, 128, nullptr, -1);
  else if (name == "global overrun")
    LIGHTCONV_LAUNCH(read_global, 1, 32, 0, nullptr, in.data(), out.data(), 1);
  else if (name == "misaligned vector")
    LIGHTCONV_LAUNCH(read_vectors, 1, 1, 0, nullptr, in.data(), reinterpret_cast<float4*>(out.data()));
  else if (name == "early return")
    LIGHTCONV_LAUNCH(leave_early, 1, 64, 0, nullptr);
  else if (name == "two barriers")
    LIGHTCONV_LAUNCH(two_barriers, 1, 64, 0, nullptr);
  else if (name == "lane leaves")
    LIGHTCONV_LAUNCH(lane_leaves, 1, 32, 0, nullptr, numbers.data());
  else if (name == "wrong mask")
    LIGHTCONV_LAUNCH(wrong_mask, 1, 32, 0, nullptr, numbers.data());
  else if (name == "misaligned copy")
    LIGHTCONV_LAUNCH(misaligned_copy, 1, 1, 128, nullptr, in.data());
  else if (name == "misaligned matrix")
    LIGHTCONV_LAUNCH(misaligned_matrix, 1, 32, 1024, nullptr);
  else if (name == "lowered limit") {
    cudaFuncSetAttribute(leave_early, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    cudaFuncSetAttribute(leave_early, cudaFuncAttributeMaxDynamicSharedMemorySize, 50000);
  } else
    return std::fprintf(stderr, "no such program: %s\n", name.c_str()), 2;
}
