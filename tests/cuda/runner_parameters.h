// From a call to the parameters of the launchers in cuda/*/launchers.h, as the bindings set them.
#pragma once

#include "convolution/launchers.h"
#include "decoding/launchers.h"
#include "dropout/launchers.h"
#include "loss/launchers.h"
#include "runner_calls.h"
#include "talk/launchers.h"

namespace {

// (T, B, H, K), or (H, K).
lightconv::Filters filters(const Tensor& tensor, bool dynamic) {
  const auto* s = tensor.strides;
  if (dynamic) return {tensor.data, s[0], s[1], s[2], s[3]};
  return {tensor.data, 0, 0, s[0], s[1]};
}

void set_problem(lightconv::Problem& p, const Call& call) {
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.steps = call["steps"];
  p.batch = call["batch"];
  p.channels = static_cast<int>(call["channels"]);
  p.heads = static_cast<int>(call["heads"]);
  p.state_rows = static_cast<int>(call["state_rows"]);
  p.compute_capability = static_cast<int>(call["compute_capability"]);
  p.lengths = call.pointer("lengths");
  p.lengths_int64 = call["lengths_int64"];
  p.sequences = call["sequences"];
  if (const Tensor* lengths = call.tensor("lengths")) p.lengths_stride = lengths->strides[0];
  if (const Tensor* cu_seqlens = call.tensor("cu_seqlens")) {
    p.cu_seqlens = reinterpret_cast<const std::int32_t*>(cu_seqlens->data);
    p.cu_seqlens_stride = cu_seqlens->strides[0];
  }
  p.x = call.const_rows("x");
  p.state = call.const_rows("state");
  p.out = call.rows("out");
  p.next_state = call.rows("next_state");
}

// What the gradients of both kinds of operator are called alike.
template <class Params>
void set_gradients(Params& p, const Call& call) {
  p.grad = call.const_rows("grad");
  p.grad_state = call.const_rows("grad_state");
  p.dx = call.rows("dx");
  p.dstate = call.rows("dstate");
}

lightconv::ConvBackwardParams convolution(const Call& call) {
  lightconv::ConvBackwardParams p;
  set_problem(p, call);
  set_gradients(p, call);
  p.dynamic = call["dynamic"];
  p.kernel_size = static_cast<int>(call["kernel_size"]);
  p.padding_l = static_cast<int>(call["padding_l"]);
  p.normalize = static_cast<lightconv::Normalize>(call["normalize"]);
  p.glu = call["glu"];
  p.renorm_padding = call["renorm_padding"];
  p.seed.at = static_cast<const std::int64_t*>(call.pointer("seed"));
  p.drop_below = static_cast<std::uint64_t>(call["drop_below"]);
  p.keep_scale = static_cast<float>(call.fractions.at("keep_scale"));
  p.weight = filters(call.tensors.at("weight"), p.dynamic);
  p.bias = call.pointer("bias");
  if (const Tensor* dweight = call.tensor("dweight")) {
    const auto [data, stride_t, stride_b, stride_h, stride_k] = filters(*dweight, p.dynamic);
    p.dweight = dweight->data;
    p.dweight_stride_t = stride_t;
    p.dweight_stride_b = stride_b;
    p.dweight_stride_h = stride_h;
    p.dweight_stride_k = stride_k;
  }
  return p;
}

lightconv::TalkBackwardParams talk(const Call& call) {
  lightconv::TalkBackwardParams p;
  set_problem(p, call);
  set_gradients(p, call);
  p.max_left = static_cast<int>(call["max_left"]);
  p.max_right = static_cast<int>(call["max_right"]);
  const auto offsets = [&](auto& to, const char* key) {
    const Tensor* tensor = call.tensor(key);
    if (tensor) to = {tensor->data, tensor->strides[0], tensor->strides[1], tensor->strides[2]};
  };
  offsets(p.left, "offset_left");
  offsets(p.right, "offset_right");
  offsets(p.dleft, "dleft");
  offsets(p.dright, "dright");
  return p;
}

lightconv::LossParams loss(const Call& call) {
  lightconv::LossParams p;
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.rows = call["rows"];
  p.words = call["words"];
  p.ignore = call["ignore"];
  p.epsilon = call.fractions.at("epsilon");
  const auto [logits, pitch, unused] = call.const_rows("logits");
  p.logits = logits;
  p.pitch = pitch;
  p.target = static_cast<const std::int64_t*>(call.pointer("target"));
  const auto numbers = [&](const char* key) { return static_cast<float*>(call.pointer(key)); };
  p.loss = numbers("loss");
  p.nll = numbers("nll");
  p.normaliser = numbers("normaliser");
  p.grad_loss = numbers("grad_loss");
  p.grad_nll = numbers("grad_nll");
  if (p.grad_loss) p.grad_loss_stride = call.tensor("grad_loss")->strides[0];
  if (p.grad_nll) p.grad_nll_stride = call.tensor("grad_nll")->strides[0];
  const auto gradient = call.rows("gradient");
  p.gradient = gradient.data;
  p.gradient_pitch = gradient.stride_t;
  return p;
}

lightconv::Mask mask(const Call& call) {
  lightconv::Mask mask;
  mask.seed.at = static_cast<const std::int64_t*>(call.pointer("seed"));
  if (!mask.seed.at) mask.seed.value = static_cast<std::uint64_t>(call["host_seed"]);
  mask.drop_below = static_cast<std::uint64_t>(call["drop_below"]);
  mask.keep_scale = static_cast<float>(call.fractions.at("keep_scale"));
  return mask;
}

lightconv::NormParams norm(const Call& call) {
  lightconv::NormParams p;
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.rows = call["rows"];
  p.channels = call["norm_channels"];
  p.epsilon = static_cast<float>(call.fractions.at("epsilon"));
  p.mask = mask(call);
  p.x = call.pointer("x");
  p.residual = call.pointer("residual");
  p.weight = call.pointer("weight");
  p.bias = call.pointer("bias");
  p.out = call.pointer("out");
  p.grad = call.pointer("grad");
  p.dx = call.pointer("dx");
  p.dresidual = call.pointer("dresidual");
  p.dweight = call.pointer("dweight");
  p.dbias = call.pointer("dbias");
  return p;
}

lightconv::ReluParams relu(const Call& call) {
  lightconv::ReluParams p;
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.elements = call["elements"];
  p.mask = mask(call);
  p.x = call.pointer("x");
  p.out = call.pointer("out");
  p.grad = call.pointer("grad");
  p.dx = call.pointer("dx");
  return p;
}

lightconv::RingParams ring(const Call& call) {
  lightconv::RingParams p;
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.float_weight = call["float_weight"];
  p.rows = call["rows"];
  p.beams = static_cast<int>(call["beams"]);
  p.channels = static_cast<int>(call["channels"]);
  p.heads = static_cast<int>(call["heads"]);
  p.taps = static_cast<int>(call["taps"]);
  p.slots = static_cast<int>(call["slots"]);
  p.sentences = call["sentences"];
  p.width = call["width"];
  p.softmax = call["softmax"];
  p.x = call.pointer("x");
  p.x_stride = call.tensors.at("x").strides[0];
  p.ring = call.pointer("ring");
  const Tensor& weight = call.tensors.at("weight");
  p.weight = weight.data;
  p.weight_stride_n = weight.strides[0];
  p.weight_stride_h = weight.strides[1];
  p.weight_stride_k = weight.strides[2];
  p.bias = call.pointer("bias");
  const Tensor& ancestors = call.tensors.at("ancestors");
  p.ancestors = reinterpret_cast<const std::int64_t*>(ancestors.data);
  p.ancestors_stride_s = ancestors.strides[0];
  p.ancestors_stride_b = ancestors.strides[1];
  p.ancestors_stride_t = ancestors.strides[2];
  p.now = static_cast<const std::int64_t*>(call.pointer("now"));
  p.out = call.pointer("out");
  return p;
}

lightconv::BestParams best(const Call& call) {
  lightconv::BestParams p;
  p.type = static_cast<lightconv::Type>(call["type"]);
  p.rows = call["rows"];
  p.words = static_cast<int>(call["vocabulary"]);
  p.count = static_cast<int>(call["count"]);
  p.logits = call.pointer("logits");
  p.pitch = call.tensors.at("logits").strides[0];
  const auto numbers = [&](const char* key) { return static_cast<float*>(call.pointer(key)); };
  p.normalisers = numbers("normalisers");
  if (p.normalisers) p.normaliser_stride = call.tensor("normalisers")->strides[0];
  p.scores = numbers("scores");
  if (p.scores) p.score_stride = call.tensor("scores")->strides[0];
  p.penalties = static_cast<int>(call["penalties"]);
  for (int i = 0; i < p.penalties; ++i) {
    p.penalised[i] = static_cast<int>(call[("penalised" + std::to_string(i)).c_str()]);
    p.penalty[i] = static_cast<float>(call.fractions.at("penalty" + std::to_string(i)));
  }
  p.log_probabilities = numbers("log_probabilities");
  p.best = static_cast<std::int64_t*>(call.pointer("best"));
  return p;
}

}  // namespace
