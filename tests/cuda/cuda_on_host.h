// CUDA's builtins on a CPU, so that the very same .cu sources compile with g++ and run under the sanitizers.
//
// One OS thread runs everything. The threads of a block are fibers: each runs until it waits (a barrier, a shuffle, a
// matrix product) or ends, so a program behaves the same on every run. Threads that disagree about where they wait, or
// leave while others wait, are reported, where a device would hang or compute nonsense. See cuda_on_host.cpp and
// cuda_on_host_warp.cpp.
//
// Included by cuda/common/problem.h under LIGHTCONV_HOST, and only there. Types of half width: cuda_on_host_half.h.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

// ------------------------------------------------------------------------------------------------ keywords

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
// __shared__ is missing on purpose: shared memory is dynamic (LIGHTCONV_DYNAMIC_SHARED), whose ends are watched and whose
// content is undefined in every block, as a static array's would not be.

// ------------------------------------------------------------------------------------------------ vectors

#define LIGHTCONV_HOST_VECTORS(T, name, alignment2, alignment4)      \
  struct alignas(alignment2) name##2 { T x, y; };                    \
  struct name##3 { T x, y, z; };                                     \
  struct alignas(alignment4) name##4 { T x, y, z, w; };              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;

LIGHTCONV_HOST_VECTORS(uchar, uchar, 2, 4)
LIGHTCONV_HOST_VECTORS(short, short, 4, 8)
LIGHTCONV_HOST_VECTORS(ushort, ushort, 4, 8)
LIGHTCONV_HOST_VECTORS(int, int, 8, 16)
LIGHTCONV_HOST_VECTORS(uint, uint, 8, 16)
LIGHTCONV_HOST_VECTORS(float, float, 8, 16)
LIGHTCONV_HOST_VECTORS(double, double, 16, 16)
#undef LIGHTCONV_HOST_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Read by kernels, set by the scheduler whenever another thread goes on.
inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------------ the runtime

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotSupported = 801,
};
using cudaStream_t = struct CUstream_st*;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

// What is called most often, and touches no memory but the emulator's own: the sanitizers need not watch it.
#define LIGHTCONV_HOST_OWN_MEMORY __attribute__((no_sanitize("address", "undefined")))

namespace lightconv_host {

using Site = std::source_location;

// What the emulated device offers: settable, so that tests can be small devices.
struct Device {
  int shared_without_asking = 48 * 1024;
  int shared_at_most = 99 * 1024;  // compute capability 8.6, 8.9 and 12.0; 7.5 has 64 KB
  unsigned grid_height = 65535;    // blocks along y and z
  int multiprocessors = 4;
  int major = 8, minor = 6;
};
inline Device device;

// The order in which threads and blocks run, what memory holds before it is written, and when copies take place. A
// program whose results depend on it has a race or reads what nobody wrote.
enum class Order { ascending, descending };
inline Order order = Order::ascending;

// Which of the mistakes of test_mutations.py is being made; 0: none. The sources themselves know nothing of it.
inline int mistake = 0;

// Ends the program, naming the kernel and the block.
[[noreturn]] void fail(const std::string& what);
std::string where(const Site& site);
// Complains about an address that is not a multiple of `bytes`, or not in the block's dynamic shared memory.
void must_be_shared(const void* address, std::size_t bytes, const char* what, const Site& site);

cudaError_t allow_shared(const void* kernel, int bytes);
void run_grid(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared, void (*call)(void*),
              void* arguments);

// Where launches go instead of being run, with the parameters as a device gets them (speed/launches.cpp).
using Launched = void (*)(const void* kernel, dim3 grid, dim3 block, std::size_t shared, const std::string& parameters);
inline Launched launched = nullptr;

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.resize((bytes.size() + alignof(T) - 1) / alignof(T) * alignof(T));
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t,
            Arguments&&... arguments) {
  static_assert((0 + ... + sizeof(Parameters)) <= 4096, "kernel parameters exceed CUDA's 4 KB");
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  if (launched != nullptr) {
    std::string bytes;
    std::apply([&](const auto&... value) { (append(bytes, value), ...); }, values);
    return launched(reinterpret_cast<const void*>(kernel), grid, block, shared, bytes);
  }
  auto body = [&] { std::apply(kernel, values); };
  run_grid(
      name, reinterpret_cast<const void*>(kernel), grid, block, shared,
      [](void* call) { (*static_cast<decltype(body)*>(call))(); }, &body);
}

void* dynamic_shared();

}  // namespace lightconv_host

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  return lightconv_host::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

#define LIGHTCONV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  lightconv_host::launch(#kernel, kernel, grid, block, shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__)
#define LIGHTCONV_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(lightconv_host::dynamic_shared())

// ------------------------------------------------------------------------------------------------ barriers, warps

namespace lightconv_host {

inline constexpr unsigned full_warp = 0xffffffffu;

// What a lane brings to a warp's common instruction. `words` of `in` and `out`; `source` the lane it wants to hear.
struct Exchange {
  const void* in;
  void* out;
  std::size_t bytes;
  int source;
};
// Called once, by the last lane to arrive, with one Exchange a lane; nullptr for lanes that do not take part.
using Together = void (*)(Exchange* lanes[32], const Site& site);

void barrier(const Site& site);
void collective(const char* name, unsigned mask, Together together, Exchange* mine, const Site& site);
int lane();
void shuffle(Exchange* lanes[32], const Site& site);
void ballot(Exchange* lanes[32], const Site& site);

template <class T>
T shuffled(const char* name, unsigned mask, T value, int source, int width, const Site& site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0 && sizeof(T) <= 8);
  T result{};
  const int first = lane() & ~(width - 1);
  Exchange mine{&value, &result, sizeof(T), source < first || source >= first + width ? lane() : source};
  collective(name, mask, shuffle, &mine, site);
  return result;
}

inline unsigned voted(const char* name, unsigned mask, bool value, const Site& site) {
  unsigned result = 0;
  Exchange mine{&value, &result, sizeof value, 0};
  collective(name, mask, ballot, &mine, site);
  return result;
}

}  // namespace lightconv_host

inline void __syncthreads(const lightconv_host::Site& site = lightconv_host::Site::current()) {
  lightconv_host::barrier(site);
}

inline void __syncwarp(unsigned mask = lightconv_host::full_warp,
                       const lightconv_host::Site& site = lightconv_host::Site::current()) {
  lightconv_host::Exchange mine{};
  lightconv_host::collective("__syncwarp", mask, nullptr, &mine, site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const lightconv_host::Site& site = lightconv_host::Site::current()) {
  const int first = lightconv_host::lane() & ~(width - 1);
  return lightconv_host::shuffled("__shfl_sync", mask, value, first + (source & (width - 1)), width, site);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  const lightconv_host::Site& site = lightconv_host::Site::current()) {
  return lightconv_host::shuffled("__shfl_xor_sync", mask, value, lightconv_host::lane() ^ bits, width, site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const lightconv_host::Site& site = lightconv_host::Site::current()) {
  const int source = lightconv_host::lane() - static_cast<int>(delta);
  return lightconv_host::shuffled("__shfl_up_sync", mask, value, source, width, site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const lightconv_host::Site& site = lightconv_host::Site::current()) {
  const int source = lightconv_host::lane() + static_cast<int>(delta);
  return lightconv_host::shuffled("__shfl_down_sync", mask, value, source, width, site);
}

inline unsigned __ballot_sync(unsigned mask, bool value,
                              const lightconv_host::Site& site = lightconv_host::Site::current()) {
  return lightconv_host::voted("__ballot_sync", mask, value, site);
}

inline int __any_sync(unsigned mask, bool value, const lightconv_host::Site& site = lightconv_host::Site::current()) {
  return lightconv_host::voted("__any_sync", mask, value, site) != 0;
}

inline int __all_sync(unsigned mask, bool value, const lightconv_host::Site& site = lightconv_host::Site::current()) {
  return lightconv_host::voted("__all_sync", mask, value, site) == mask;
}

// ------------------------------------------------------------------------------------------------ matrix, copies

namespace lightconv_host {

// d = a·b + c of PTX's mma.m16n8k16.row.col, fragments as PTX lays them out; called by all 32 lanes of a warp.
void mma_m16n8k16(float d[4], const std::uint32_t a[4], const std::uint32_t b[2], const float c[4], bool bf16,
                  const Site& site = Site::current());

// PTX's ldmatrix.m8n8.b16: `row` is the shared 16-byte row that this lane points at (for x2: lanes 0 to 15).
void ldmatrix_x4(std::uint32_t r[4], const void* row, bool transposed, const Site& site = Site::current());
void ldmatrix_x2(std::uint32_t r[2], const void* row, bool transposed, const Site& site = Site::current());

// cp.async: 4, 8 or 16 bytes into shared memory, those beyond `source_bytes` zero. Seen after the wait for its group.
void cp_async(void* shared, const void* global, int bytes, int source_bytes, const Site& site = Site::current());
inline void cp_async(void* shared, const void* global, int bytes, const Site& site = Site::current()) {
  cp_async(shared, global, bytes, bytes, site);
}
void cp_async_commit();
void cp_async_wait(int groups_left);

}  // namespace lightconv_host

// ------------------------------------------------------------------------------------------------ numbers

template <class A, class B>
constexpr std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __logf(float a) { return std::log(a); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(std::uint64_t{a} * b >> 32); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a ? __builtin_clz(static_cast<unsigned>(a)) : 32; }
inline int __ffs(int a) { return __builtin_ffs(a); }

namespace lightconv_host {
template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
}  // namespace lightconv_host

inline unsigned __float_as_uint(float a) { return lightconv_host::bits<unsigned>(a); }
inline float __uint_as_float(unsigned a) { return lightconv_host::bits<float>(a); }
inline int __float_as_int(float a) { return lightconv_host::bits<int>(a); }
inline float __int_as_float(int a) { return lightconv_host::bits<float>(a); }

// As far from exp as a device's may be: ex2.approx, exact at 0 and else within two units in the last place, of a product
// that is rounded. Which way depends on `a` alone.
inline float __expf(float a) {
  const float exact = std::exp2(a * 1.44269504f);
  if (a == 0.0f || !std::isnormal(exact)) return exact;
  const unsigned mixed = __float_as_uint(a) * 2654435761u;
  return __int_as_float(__float_as_int(exact) + static_cast<int>(mixed >> 16) % 5 - 2);
}

#include "cuda_on_host_half.h"
