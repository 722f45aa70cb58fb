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

// The kernels read and write rows: channels, taps of a filter and offsets of heads are neighbours in memory. Others cost
// a copy, in which expanded dimensions remain so.
inline Tensor rows_of(const Tensor& tensor) {
  if (tensor.stride(-1) == 1 || tensor.size(-1) == 1) return tensor;
  Tensor once = tensor;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  return once.contiguous().expand(tensor.sizes());
}

inline OptionalTensor rows_of(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(rows_of(*tensor)) : std::nullopt;
}

template <class T>
View<const T> view(const Tensor& tensor) {
  return {elements<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

template <class T>
View<T> writable(const Tensor& tensor) {
  return {writable_elements<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

// Filters (H, K) or (T, B, H, K), or offsets (T, B, H).
template <class T>
FilterView<T> filter_view(T* data, const Tensor& tensor) {
  const bool offsets = tensor.dim() == 3, shared = tensor.dim() == 2;
  return {data, shared ? 0 : tensor.stride(0), shared ? 0 : tensor.stride(1), offsets ? 1 : tensor.stride(-2)};
}

// The same as at::empty_like, whose header takes seconds to compile.
inline Tensor new_like(const Tensor& tensor) {
  return tensor.new_empty_strided(
      tensor.sizes(), tensor.is_non_overlapping_and_dense()
                          ? tensor.strides().vec()
                          : at::infer_dense_strides(tensor.sizes(), tensor.strides()));
}

// A result, whose layout is that of at::empty_like(like): the operator's fake kernel promises it. If its last dimension
// is not contiguous, the kernels write to a temporary tensor, and `finish` copies it. (This may happen although `like`
// itself is made of rows, if they overlap.)
class Result {
 public:
  // If it is not needed, an empty tensor, and nothing to write.
  explicit Result(const Tensor& like, bool needed = true)
      : tensor_(needed ? new_like(like) : like.new_empty({0})), written_(tensor_) {
    if (tensor_.size(-1) > 1 && tensor_.stride(-1) != 1) written_ = tensor_.new_empty(tensor_.sizes());
  }

  bool empty() const { return written_.numel() == 0; }

  // What the kernels write: nothing where there is none.
  template <class T>
  View<T> rows() const {
    return empty() ? View<T>() : writable<T>(written_);
  }
  template <class T>
  FilterView<T> filters() const {
    return empty() ? FilterView<T>() : filter_view(writable_elements<T>(written_), written_);
  }

  void zero() const { written_.zero_(); }

  Tensor finish() const {
    if (!written_.is_same(tensor_)) tensor_.copy_(written_);
    return tensor_;
  }

 private:
  Tensor tensor_, written_;
};

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
