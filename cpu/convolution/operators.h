// lightconv and dynamicconv, from torch's tensors to a Problem and back: one operator, whose weight is (H, K) or
// (T, B, H, K).
// Arguments have been checked in Python (ops/checks.py); the checks here guard against direct calls.

#pragma once

#include <string>
#include <tuple>

#include "common/arguments.h"
#include "convolution/kernels.h"

namespace lightconv {

// ------------------------------------------------------------------------------------------------ arguments

struct Options {
  OptionalTensor lengths, cu_seqlens, seed;
  std::string_view normalize;
  double dropout = 0;
  bool renorm = false, glu = false;
};

// x without its gates, whose layout the output has.
inline Tensor values(const Tensor& x, bool glu) { return glu ? x.narrow(-1, 0, x.size(-1) / 2) : x; }

template <class T>
void set_sequences(Problem<T>& p, const Options& options) {
  p.sequences = sequences_of(options.lengths, options.cu_seqlens, p.steps, p.seen, p.batch);
}

template <class T>
Problem<T> problem(const Tensor& x, const Tensor& weight, const Options& options) {
  TORCH_CHECK(
      x.dim() == 3 && (weight.dim() == 2 || weight.dim() == 4),
      "lightconv: x must be (T, B, C), weight (H, K) or (T, B, H, K)");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "lightconv: weight must have x's dtype");
  Problem<T> p;
  p.steps = x.size(0);
  p.batch = x.size(1);
  p.heads = weight.size(-2);
  p.per_head = x.size(2) / (options.glu ? 2 : 1) / p.heads;
  p.kernel_size = weight.size(-1);
  p.threads = threads();
  p.glu = options.glu;
  p.renorm = options.renorm;
  p.normalize = normalize_of(options.normalize);
  TORCH_CHECK(p.normalize != Normalize::kUnknown, "lightconv: unknown normalize: ", std::string(options.normalize));
  if (options.dropout > 0) {
    p.dropout = dropout_of(options.seed.value(), options.dropout);
  }
  p.x = view<T>(x);
  p.weight = filter_view(elements<T>(weight), weight);
  p.shared = weight.dim() == 2;
  return p;
}

template <class T>
std::vector<Sum<T>> padded_bias(const Problem<T>& p, const OptionalTensor& bias) {
  if (!bias) return {};
  const int64_t pitch = p.channel_pitch();
  std::vector<Sum<T>> padded(p.heads * pitch);
  const Tensor row = bias->contiguous();
  for (int64_t h = 0; h < p.heads; ++h) {
    widen_row(elements<T>(row) + h * p.per_head, p.per_head, padded.data() + h * pitch);
  }
  return padded;
}

// ------------------------------------------------------------------------------------------------ the operators

inline Tensor conv_op(
    const Tensor& any_x, const Tensor& any_weight, const OptionalTensor& bias, const OptionalTensor& lengths,
    const OptionalTensor& cu_seqlens, const OptionalTensor& seed, int64_t padding_l, std::string_view normalize,
    double dropout, bool renorm, bool glu) {
  const Options options{lengths, cu_seqlens, seed, normalize, dropout, renorm, glu};
  const Tensor x = rows_of(any_x), weight = rows_of(any_weight);
  const Result out(values(any_x, glu));
  if (out.empty()) return out.finish();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> p = problem<T>(x, weight, options);
    p.offset = -padding_l;
    p.out = out.rows<T>();
    set_sequences(p, options);
    const std::vector<Sum<T>> padded = padded_bias(p, bias);
    p.bias = bias ? padded.data() : nullptr;
    run_forward(p);
  });
  return out.finish();
}

inline std::tuple<Tensor, Tensor> conv_backward_op(
    const Tensor& any_grad, const Tensor& any_x, const Tensor& any_weight, const OptionalTensor& lengths,
    const OptionalTensor& cu_seqlens, const OptionalTensor& seed, int64_t padding_l, std::string_view normalize,
    double dropout, bool renorm, bool glu, bool need_x, bool need_weight) {
  const Options options{lengths, cu_seqlens, seed, normalize, dropout, renorm, glu};
  const Tensor x = rows_of(any_x), grad = rows_of(any_grad), weight = rows_of(any_weight);
  const Result dx(any_x, need_x), dweight(any_weight, need_weight);
  if (x.numel() == 0) dweight.zero();
  if (x.numel() == 0 || !(need_x || need_weight)) return {dx.finish(), dweight.finish()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> p = problem<T>(x, weight, options);
    p.offset = -padding_l;
    p.grad = view<T>(grad);
    p.dx = dx.rows<T>();
    p.dweight = dweight.filters<T>();
    set_sequences(p, options);
    run_backward(p);
  });
  return {dx.finish(), dweight.finish()};
}

template <class T>
void set_state(Problem<T>& p, const Tensor& state, const Options& options) {
  p.seen = state.size(0);
  p.offset = p.seen - (p.kernel_size - 1);
  p.next_rows = std::min(p.sources(), p.kernel_size - 1);
  p.state = view<T>(state);
  set_sequences(p, options);
}

inline std::tuple<Tensor, Tensor> conv_step_op(
    const Tensor& any_x, const Tensor& any_state, const Tensor& any_weight, const OptionalTensor& bias,
    const OptionalTensor& seed, std::string_view normalize, double dropout, bool renorm, bool glu) {
  const Options options{{}, {}, seed, normalize, dropout, renorm, glu};
  const Tensor x = rows_of(any_x), state = rows_of(any_state), weight = rows_of(any_weight);
  const Result out(values(any_x, glu));
  const int64_t rows = std::min(state.size(0) + x.size(0), weight.size(-1) - 1);
  const Tensor next = state.new_empty({rows, state.size(1), state.size(2)});
  if (out.empty()) return {out.finish(), next};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> p = problem<T>(x, weight, options);
    p.out = out.rows<T>();
    set_state(p, state, options);
    p.next = writable<T>(next);
    const std::vector<Sum<T>> padded = padded_bias(p, bias);
    p.bias = bias ? padded.data() : nullptr;
    run_forward(p);
  });
  return {out.finish(), next};
}

inline std::tuple<Tensor, Tensor, Tensor> conv_step_backward_op(
    const OptionalTensor& any_grad, const OptionalTensor& any_grad_state, const Tensor& any_x, const Tensor& any_state,
    const Tensor& any_weight, const OptionalTensor& seed, std::string_view normalize, double dropout, bool renorm,
    bool glu, bool need_x, bool need_state, bool need_weight) {
  const Options options{{}, {}, seed, normalize, dropout, renorm, glu};
  const Tensor x = rows_of(any_x), state = rows_of(any_state), weight = rows_of(any_weight);
  const OptionalTensor grad = rows_of(any_grad), grad_state = rows_of(any_grad_state);
  const Result dx(any_x, need_x), dstate(any_state, need_state), dweight(any_weight, need_weight);
  if (x.numel() == 0 || !grad) dweight.zero();
  if (x.numel() == 0) return {dx.finish(), dstate.finish(), dweight.finish()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> p = problem<T>(x, weight, options);
    p.dx = dx.rows<T>();
    p.dstate = dstate.rows<T>();
    if (grad) p.dweight = dweight.filters<T>();
    if (grad) p.grad = view<T>(*grad);
    if (grad_state) p.grad_state = view<T>(*grad_state);
    set_state(p, state, options);
    if (!grad) {
      for (Sequence& s : p.sequences) s.out_last = 0;
    }
    run_backward(p);
  });
  return {dx.finish(), dstate.finish(), dweight.finish()};
}

}  // namespace lightconv
