// Registers the launchers of launchers.h as kernels of torch's operators; see convolution/binding.cpp.
#include <torch/library.h>

#include <tuple>

#include "common/binding.h"
#include "decoding/launchers.h"

namespace {

using lightconv::BestParams;
using lightconv::RingParams;
using namespace lightconv_binding;

Tensor ring_step(const Tensor& any_x, const Tensor& ring, const Tensor& weight, const OptionalTensor& any_bias,
                 const Tensor& ancestors, const Tensor& now, bool softmax) {
  const c10::cuda::CUDAGuard guard(any_x.device());
  const Tensor x = any_x.stride(1) == 1 ? any_x : any_x.contiguous();
  const OptionalTensor bias = any_bias ? OptionalTensor(any_bias->contiguous()) : std::nullopt;
  const Tensor out = at::empty(x.sizes(), x.options());
  RingParams p;
  p.type = type_of(x);
  p.float_weight = weight.scalar_type() == at::kFloat;
  p.rows = x.size(0);
  p.beams = checked_int(ancestors.size(1), "the number of hypotheses");
  p.channels = checked_int(x.size(1), "the number of channels C");
  p.heads = checked_int(weight.size(-2), "the number of heads H");
  p.taps = checked_int(weight.size(-1), "the kernel size K");
  p.slots = checked_int(ring.size(0), "the number of slots");
  p.sentences = ring.size(1);
  p.width = ring.size(2);
  p.softmax = softmax;
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.ring = ring.mutable_data_ptr();
  p.weight = weight.const_data_ptr();
  p.weight_stride_n = weight.dim() == 3 ? weight.stride(0) : 0;
  p.weight_stride_h = weight.stride(-2);
  p.weight_stride_k = weight.stride(-1);
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.ancestors = ancestors.const_data_ptr<int64_t>();
  p.ancestors_stride_s = ancestors.stride(0);
  p.ancestors_stride_b = ancestors.stride(1);
  p.ancestors_stride_t = ancestors.stride(2);
  p.now = now.const_data_ptr<int64_t>();
  p.out = out.mutable_data_ptr();
  check_launch(lightconv::ring_step(p, c10::cuda::getCurrentCUDAStream()), "ring_step");
  return out;
}

std::tuple<Tensor, Tensor> best_words(const Tensor& any_logits, const OptionalTensor& normalisers,
                                      const OptionalTensor& scores, int64_t count, at::IntArrayRef penalised,
                                      at::ArrayRef<double> penalties) {
  const c10::cuda::CUDAGuard guard(any_logits.device());
  const Tensor logits = any_logits.stride(1) == 1 ? any_logits : any_logits.contiguous();
  BestParams p;
  p.type = type_of(logits);
  p.rows = logits.size(0);
  p.words = checked_int(logits.size(1), "the number of words V");
  p.count = static_cast<int>(count);
  p.logits = logits.const_data_ptr();
  p.pitch = logits.stride(0);
  if (normalisers) {
    p.normalisers = normalisers->const_data_ptr<float>();
    p.normaliser_stride = normalisers->stride(0);
  }
  if (scores) {
    p.scores = scores->const_data_ptr<float>();
    p.score_stride = scores->stride(0);
  }
  p.penalties = static_cast<int>(penalised.size());
  TORCH_CHECK_VALUE(p.penalties <= lightconv::kMostPenalties, "at most ", lightconv::kMostPenalties,
                    " words can have penalties on CUDA, got ", p.penalties);
  for (int i = 0; i < p.penalties; ++i) {
    p.penalised[i] = static_cast<int>(penalised[i]);
    p.penalty[i] = static_cast<float>(penalties[i]);
  }
  Tensor found = at::empty({p.rows, count}, logits.options().dtype(at::kFloat));
  Tensor words = at::empty({p.rows, count}, logits.options().dtype(at::kLong));
  p.log_probabilities = found.mutable_data_ptr<float>();
  p.best = words.mutable_data_ptr<int64_t>();
  check_launch(lightconv::best_words(p, c10::cuda::getCurrentCUDAStream()), "best_words");
  return {found, words};
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  m.impl("ring_step", &ring_step);
  m.impl("best_words", &best_words);
}
