// talkconv and talkconv_step, from torch's tensors to a TalkProblem and back.
#pragma once

#include <tuple>

#include "common/arguments.h"
#include "talk/paths.h"
#include "talk/problem.h"

namespace lightconv {

using Tensors = std::tuple<Tensor, Tensor, Tensor>;

// The largest max_left and max_right, as on a GPU: sums and products of a few do not overflow.
constexpr int64_t kMostReach = (int64_t(1) << 30) - 1;

template <class T>
TalkProblem<T> problem(
    const Tensor& x, const Tensor& left, const OptionalTensor& right, int64_t max_left, int64_t max_right,
    int64_t tokens = 0) {
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
  Sizes sizes;
  sizes.tokens = tokens;
  p.few = take(kTalk, sizes) == &kOneByOne;
  p.max_left = max_left;
  p.max_right = max_right;
  p.x = view<T>(x);
  p.left = filter_view(elements<T>(left), left);
  if (right) p.right = filter_view(elements<T>(*right), *right);
  return p;
}

inline Tensor talkconv_op(
    const Tensor& any_x, const Tensor& any_left, const OptionalTensor& any_right, const OptionalTensor& lengths,
    const OptionalTensor& cu_seqlens, int64_t max_left, int64_t max_right) {
  const Tensor x = rows_of(any_x), left = rows_of(any_left);
  const OptionalTensor right = rows_of(any_right);
  const Result out(any_x);
  if (out.empty()) return out.finish();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = problem<T>(x, left, right, max_left, max_right);
    p.out = out.rows<T>();
    p.sequences = sequences_of(lengths, cu_seqlens, p.steps, 0, p.batch);
    talk_forward(p);
  });
  return out.finish();
}

inline Tensors talkconv_backward_op(
    const Tensor& any_grad, const Tensor& any_x, const Tensor& any_left, const OptionalTensor& any_right,
    const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, int64_t max_left, int64_t max_right, bool need_x,
    bool need_left, bool need_right) {
  const Tensor x = rows_of(any_x), grad = rows_of(any_grad), left = rows_of(any_left);
  const OptionalTensor right = rows_of(any_right);
  const Result dx(any_x, need_x), dleft(any_left, need_left);
  const Result dright(right ? *any_right : any_x, right && need_right);
  if (dx.empty() && dleft.empty() && dright.empty()) return {dx.finish(), dleft.finish(), dright.finish()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = problem<T>(x, left, right, max_left, max_right);
    p.grad = view<T>(grad);
    p.dx = dx.rows<T>();
    p.dleft = dleft.filters<T>();
    p.dright = dright.filters<T>();
    p.sequences = sequences_of(lengths, cu_seqlens, p.steps, 0, p.batch);
    talk_backward(p);
  });
  return {dx.finish(), dleft.finish(), dright.finish()};
}

template <class T>
TalkProblem<T> step_problem(const Tensor& x, const Tensor& state, const Tensor& left, int64_t max_left) {
  TalkProblem<T> p = problem<T>(x, left, {}, max_left, 0, x.size(0));
  p.seen = state.size(0);
  p.state = view<T>(state);
  p.next_rows = std::min(p.sources(), max_left);
  p.sequences = sequences_of({}, {}, p.steps, p.seen, p.batch);
  return p;
}

inline std::tuple<Tensor, Tensor> talkconv_step_op(
    const Tensor& any_x, const Tensor& any_state, const Tensor& any_left, int64_t max_left) {
  const Tensor x = rows_of(any_x), state = rows_of(any_state), left = rows_of(any_left);
  const Result out(any_x);
  const int64_t rows = std::min(state.size(0) + x.size(0), max_left);
  const Tensor next = state.new_empty({rows, state.size(1), state.size(2)});
  if (out.empty()) return {out.finish(), next};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = step_problem<T>(x, state, left, max_left);
    p.out = out.rows<T>();
    p.next = writable<T>(next);
    talk_forward(p);
  });
  return {out.finish(), next};
}

inline Tensors talkconv_step_backward_op(
    const OptionalTensor& any_grad, const OptionalTensor& any_grad_state, const Tensor& any_x, const Tensor& any_state,
    const Tensor& any_left, int64_t max_left, bool need_x, bool need_state, bool need_left) {
  const Tensor x = rows_of(any_x), state = rows_of(any_state), left = rows_of(any_left);
  const OptionalTensor grad = rows_of(any_grad), grad_state = rows_of(any_grad_state);
  const Result dx(any_x, need_x), dstate(any_state, need_state), dleft(any_left, need_left);
  if (!grad) dleft.zero();
  if (x.numel() == 0) return {dx.finish(), dstate.finish(), dleft.finish()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    TalkProblem<T> p = step_problem<T>(x, state, left, max_left);
    p.dx = dx.rows<T>();
    p.dstate = dstate.rows<T>();
    if (grad) p.grad = view<T>(*grad);
    if (grad) p.dleft = dleft.filters<T>();
    if (grad_state) p.grad_state = view<T>(*grad_state);
    if (!grad) {
      for (Sequence& s : p.sequences) s.out_last = 0;
    }
    talk_backward(p);
  });
  return {dx.finish(), dstate.finish(), dleft.finish()};
}

}  // namespace lightconv
