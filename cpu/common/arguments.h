// Converts torch's tensors to plain pointers and sizes; shared by the operators' registrations.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "common/tiles.h"

namespace lightconv {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Only direct calls pass a channel stride other than 1.
inline Tensor channels_last(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

inline OptionalTensor channels_last(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(channels_last(*tensor)) : std::nullopt;
}

template <class T>
View<const T> view(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.stride(0), tensor.stride(1)};
}

template <class T>
View<T> writable(const Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), tensor.stride(0), tensor.stride(1)};
}

inline Tensor new_gradient(const Tensor& like, bool needed) {
  return needed ? at::empty_like(like) : at::empty({0}, like.options());
}

inline std::vector<int64_t> integers(const Tensor& tensor) {
  const Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
}

// In a traced program the values are not checked beforehand. They are clamped, so that nothing outside x is accessed.
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
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "lightconv", [&] { f(scalar_t()); });
}

}  // namespace lightconv
