// talkconv and talkconv_step, from torch's tensors to a TalkProblem and back.
#pragma once

#include <tuple>

#include "common/arguments.h"
#include "talk/problem.h"

namespace lightconv {

using Tensors = std::tuple<Tensor, Tensor, Tensor>;

// A step of this many tokens or fewer adds the rows of its windows one by one.
constexpr int64_t kFew = 4;
// The largest max_left and max_right, as on a GPU: sums and products of a few do not overflow.
constexpr int64_t kMostReach = (int64_t(1) << 30) - 1;

template <class T>
FilterView<const T> offsets(const Tensor& tensor) {
  return {elements<T>(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2), 0};
}

template <class T>
FilterView<T> writable_offsets(const Tensor& tensor) {
  return {writable_elements<T>(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2), 0};
}

template <class T>
TalkProblem<T> problem(
    const Tensor& x, const Tensor& left, const OptionalTensor& right, int64_t max_left, int64_t max_right) {
  TORCH_CHECK(
      x.dim() == 3 && left.dim() == 3 && (!right || right->sizes() == left.sizes()) && 0 <= max_left &&
          max_left <= kMostReach && 0 <= max_right && max_right <= kMostReach,
      "talkconv: x must be (T, B, C), offsets (T, B, H), max_left and max_right in 0 … 2^30 − 1");
  TORCH_CHECK(
      left.scalar_type() == x.scalar_type() && (!right || right->scalar_type() == x.scalar_type()),
      "talkconv: offsets must have x's dtype");
  TalkProblem<T> p;
  p.steps = x.size(0);
  p.batch = x.size(1);
  p.heads = left.size(2);
  p.per_head = x.size(2) / p.heads;
  p.threads = threads();
  p.max_left = max_left;
  p.max_right = max_right;
  p.x = view<T>(x);
  p.left = offsets<T>(left);
  if (right) p.right = offsets<T>(*right);
  return p;
}

inline Tensor talkconv_op(
    const Tensor& any_x, const Tensor& left, const OptionalTensor& right, const OptionalTensor& lengths,
    const OptionalTensor& cu_seqlens, int64_t max_left, int64_t max_right) {
  const Tensor x = channels_last(any_x), out = new_like(x);
  if (out.numel() == 0) return out;
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = problem<T>(x, left, right, max_left, max_right);
    p.out = writable<T>(out);
    p.sequences = sequences_of(lengths, cu_seqlens, p.steps, 0, p.batch);
    talk_forward(p);
  });
  return out;
}

inline Tensors talkconv_backward_op(
    const Tensor& any_grad, const Tensor& any_x, const Tensor& left, const OptionalTensor& right,
    const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, int64_t max_left, int64_t max_right, bool need_x,
    bool need_left, bool need_right) {
  const Tensor x = channels_last(any_x), grad = channels_last(any_grad);
  const Tensor dx = new_gradient(x, need_x), dleft = new_gradient(left, need_left);
  const Tensor dright = new_gradient(right ? *right : x, right && need_right);
  if (x.numel() == 0 || !(need_x || need_left || dright.numel())) return {dx, dleft, dright};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = problem<T>(x, left, right, max_left, max_right);
    p.grad = view<T>(grad);
    if (need_x) p.dx = writable<T>(dx);
    if (need_left) p.dleft = writable_offsets<T>(dleft);
    if (dright.numel()) p.dright = writable_offsets<T>(dright);
    p.sequences = sequences_of(lengths, cu_seqlens, p.steps, 0, p.batch);
    talk_backward(p);
  });
  return {dx, dleft, dright};
}

template <class T>
TalkProblem<T> step_problem(const Tensor& x, const Tensor& state, const Tensor& left, int64_t max_left) {
  TalkProblem<T> p = problem<T>(x, left, {}, max_left, 0);
  p.seen = state.size(0);
  p.state = view<T>(state);
  p.next_rows = std::min(p.sources(), max_left);
  p.few = p.steps <= kFew;
  p.sequences = sequences_of({}, {}, p.steps, p.seen, p.batch);
  return p;
}

inline std::tuple<Tensor, Tensor> talkconv_step_op(
    const Tensor& any_x, const Tensor& any_state, const Tensor& left, int64_t max_left) {
  const Tensor x = channels_last(any_x), state = channels_last(any_state), out = new_like(x);
  const int64_t rows = std::min(state.size(0) + x.size(0), max_left);
  const Tensor next = state.new_empty({rows, state.size(1), state.size(2)});
  if (out.numel() == 0) return {out, next};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = step_problem<T>(x, state, left, max_left);
    p.out = writable<T>(out);
    p.next = writable<T>(next);
    talk_forward(p);
  });
  return {out, next};
}

inline Tensors talkconv_step_backward_op(
    const OptionalTensor& any_grad, const OptionalTensor& any_grad_state, const Tensor& any_x, const Tensor& any_state,
    const Tensor& left, int64_t max_left, bool need_x, bool need_state, bool need_left) {
  const Tensor x = channels_last(any_x), state = channels_last(any_state);
  const OptionalTensor grad = channels_last(any_grad), grad_state = channels_last(any_grad_state);
  const Tensor dx = new_gradient(x, need_x), dstate = new_gradient(state, need_state);
  const Tensor dleft = new_gradient(left, need_left);
  if (!grad) dleft.zero_();
  if (x.numel() == 0) return {dx, dstate, dleft};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = step_problem<T>(x, state, left, max_left);
    if (need_x) p.dx = writable<T>(dx);
    if (need_state) p.dstate = writable<T>(dstate);
    if (grad) p.grad = view<T>(*grad);
    if (grad && need_left) p.dleft = writable_offsets<T>(dleft);
    if (grad_state) p.grad_state = view<T>(*grad_state);
    if (!grad) {
      for (Sequence& s : p.sequences) s.out_last = 0;
    }
    talk_backward(p);
  });
  return {dx, dstate, dleft};
}

}  // namespace lightconv
