// Converts torch's tensors to plain pointers and sizes; shared by the operators' registrations.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <vector>

#include "common/philox.h"
#include "common/scalars.h"
#include "common/tiles.h"

namespace at {
// Declared here because ATen/ExpandUtils.h includes every operator of torch.
TORCH_API std::vector<int64_t> infer_dense_strides(IntArrayRef sizes, IntArrayRef strides);
}  // namespace at

namespace lightconv {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// How many threads a kernel may use. Inside one of torch's parallel regions it runs on the calling thread.
inline int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// The 16-bit types of the kernels are torch's, bit by bit.
template <class T>
const T* elements(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* writable_elements(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Only direct calls pass a channel stride other than 1.
inline Tensor channels_last(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

inline OptionalTensor channels_last(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(channels_last(*tensor)) : std::nullopt;
}

template <class T>
View<const T> view(const Tensor& tensor) {
  return {elements<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

template <class T>
View<T> writable(const Tensor& tensor) {
  return {writable_elements<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

// The same as at::empty_like, whose header takes seconds to compile.
inline Tensor new_like(const Tensor& tensor) {
  return tensor.new_empty_strided(
      tensor.sizes(), tensor.is_non_overlapping_and_dense()
                          ? tensor.strides().vec()
                          : at::infer_dense_strides(tensor.sizes(), tensor.strides()));
}

inline Tensor new_gradient(const Tensor& like, bool needed) { return needed ? new_like(like) : like.new_empty({0}); }

inline Dropout dropout_of(const Tensor& seed, double p) {
  return {uint64_t(seed.item<int64_t>()), uint64_t(std::ceil(p * 4294967296.0)), 1 / (1 - p)};
}

inline std::vector<int64_t> integers(const Tensor& tensor) {
  const Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
}

// In a traced program the values have not been checked, so they are clamped: nothing outside x is accessed.
inline std::vector<Sequence> sequences_of(
    const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, int64_t steps, int64_t seen, int64_t batch) {
  std::vector<Sequence> sequences;
  if (cu_seqlens) {
    const std::vector<int64_t> edges = integers(*cu_seqlens);
    int64_t first = 0;
    for (size_t i = 1; i < edges.size(); ++i) {
      const int64_t last = i + 1 == edges.size() ? steps : std::clamp(edges[i], first, steps);
      if (first < last) sequences.push_back({0, first, last, first, last});
      first = last;
    }
    return sequences;
  }
  const std::vector<int64_t> ends = lengths ? integers(*lengths) : std::vector<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t last = lengths ? std::clamp<int64_t>(ends[b], 0, steps) : seen + steps;
    sequences.push_back({b, 0, last, 0, steps});
  }
  return sequences;
}

// Calls f with a zero of the tensor's element type.
template <class F>
void dispatch(const Tensor& x, F f) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return f(float());
    case at::kDouble:
      return f(double());
    case at::kHalf:
      return f(Float16());
    case at::kBFloat16:
      return f(BFloat16());
    default:
      TORCH_CHECK(false, "lightconv: x must be float32, float64, float16 or bfloat16, got ", x.scalar_type());
  }
}

}  // namespace lightconv
