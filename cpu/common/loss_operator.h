// The operators label_smoothed_nll and label_smoothed_nll_backward: from torch's tensors to plain pointers.
#pragma once

#include <tuple>

#include "common/arguments.h"
#include "common/loss.h"

namespace lightconv {

template <class T>
Logits<T> logits_of(const Tensor& logits, const Tensor& target, double epsilon, int64_t ignore) {
  return {elements<T>(logits), logits.stride(0), logits.size(0),          logits.size(1),
          target.const_data_ptr<int64_t>(), ignore, epsilon};
}

// Targets are checked here, where they are about to be read: nothing outside the logits is accessed.
inline void check_targets(const Tensor& target, int64_t words, int64_t ignore) {
  const int64_t* word = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i) {
    TORCH_CHECK_INDEX(word[i] == ignore || (0 <= word[i] && word[i] < words), "target must be in 0 … ", words - 1,
                      ", or ignore_index = ", ignore, "; target[", i, "] is ", word[i]);
  }
}

inline at::ScalarType sums_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline std::tuple<Tensor, Tensor, Tensor> label_smoothed_nll_op(const Tensor& any_logits, const Tensor& any_target,
                                                                double epsilon, int64_t ignore) {
  const Tensor logits = rows_of(any_logits), target = any_target.contiguous();
  check_targets(target, logits.size(1), ignore);
  const auto options = logits.options().dtype(sums_type(logits));
  const Tensor loss = logits.new_empty({logits.size(0)}, options), nll = logits.new_empty({logits.size(0)}, options);
  const Tensor normaliser = logits.new_empty({logits.size(0)}, options);
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    smoothed_loss(logits_of<T>(logits, target, epsilon, ignore), writable_elements<Sum<T>>(loss),
                  writable_elements<Sum<T>>(nll), writable_elements<Sum<T>>(normaliser), threads());
  });
  return {loss, nll, normaliser};
}

inline Tensor label_smoothed_nll_backward_op(const OptionalTensor& grad_loss, const OptionalTensor& grad_nll,
                                             const Tensor& any_logits, const Tensor& any_target,
                                             const Tensor& normaliser, double epsilon, int64_t ignore) {
  const Tensor logits = rows_of(any_logits), target = any_target.contiguous(), sums = normaliser.contiguous();
  check_targets(target, logits.size(1), ignore);
  const Tensor of_loss = grad_loss ? grad_loss->contiguous() : sums.new_zeros(sums.sizes());
  const Tensor of_nll = grad_nll ? grad_nll->contiguous() : Tensor();
  const Result gradient(any_logits);
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    const View<T> rows = gradient.rows<T>();
    smoothed_loss_backward(logits_of<T>(logits, target, epsilon, ignore), elements<Sum<T>>(of_loss),
                           of_nll.defined() ? elements<Sum<T>>(of_nll) : nullptr, elements<Sum<T>>(sums), rows.data,
                           rows.time, threads());
  });
  return gradient.finish();
}

}  // namespace lightconv
