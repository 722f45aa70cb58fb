// The operators' derivatives as registration.py has them, without Python: at small sizes the host's time is the time of
// a call, and recording a call in Python takes several times as long as the operator.
//
// Included once by the library of the CPU and once by that of CUDA, beside the operators that it registers, each for its
// own dispatch key (LIGHTCONV_AUTOGRAD is AutogradCPU or AutogradCUDA), which takes precedence over what registration.py
// registers for `Autograd`. That one serves where no native library is loaded. Both save the same tensors and call the same
// operators in the backward pass.
//
// All operators have one pattern, so one boxed kernel serves them all:
//
//     forward    (t₁, …, tₙ[, bias], other arguments)
//     backward   (a gradient for each output, t₁, …, tₙ, other arguments, is t₁'s gradient needed, …, tₙ's)

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>

namespace lightconv {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

struct Operator {
  const char* name;
  const char* backward;         // its backward operator; null: it has none
  size_t gradients;             // n, the tensors that the backward operator differentiates for
  bool bias = false;            // after them comes a bias (C,) or None, added to every output
  bool optional_grads = false;  // the backward operator takes None for the gradient of an output that nobody used
  bool own_transpose = false;   // linear in its first tensor: with a gradient in its place it gives the gradient
  bool from_output = false;     // the backward operator takes the output in place of the first tensor

  // Whether the backward operator is told which gradients are needed: one is always.
  bool asks() const { return !own_transpose && !from_output; }
};

constexpr Operator kOperators[] = {
    {"lightconv", "lightconv_backward", 2, true},
    {"dynamicconv", "dynamicconv_backward", 2, true},
    {"lightconv_step", "lightconv_step_backward", 3, true, true},
    {"dynamicconv_step", "dynamicconv_step_backward", 3, true, true},
    {"talkconv", "talkconv_backward", 3},
    {"talkconv_step", "talkconv_step_backward", 3, false, true},
    {"dropout", "dropout", 1, false, false, true},
    {"relu_dropout", "relu_dropout_backward", 1, false, false, false, true},
    {"dropout_add_norm", "dropout_add_norm_backward", 4},
    {"lightconv_backward", nullptr, 0},
    {"dynamicconv_backward", nullptr, 0},
    {"lightconv_step_backward", nullptr, 0},
    {"dynamicconv_step_backward", nullptr, 0},
    {"talkconv_backward", nullptr, 0},
    {"talkconv_step_backward", nullptr, 0},
    {"relu_dropout_backward", nullptr, 0},
    {"dropout_add_norm_backward", nullptr, 0},
};
constexpr int64_t kCount = sizeof(kOperators) / sizeof(kOperators[0]);

const c10::OperatorHandle& backward_operator(int64_t which) {
  static const std::vector<c10::OperatorHandle> found = [] {
    std::vector<c10::OperatorHandle> handles;
    for (const Operator& op : kOperators) {
      const std::string name = std::string("lightconv::") + (op.backward ? op.backward : op.name);
      handles.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""));
    }
    return handles;
  }();
  return found[which];
}

// Gradients must meet the operators' requirements for x; autograd creates expanded and transposed ones.
IValue contiguous_channels(const Tensor& grad) {
  if (!grad.defined()) return IValue();
  return grad.sym_stride(-1) == 1 ? grad : grad.contiguous();
}

// A recorded call. Its tensor arguments are saved as such (undefined for None), the others in a tuple.
struct Recorded : torch::autograd::Function<Recorded> {
  static constexpr bool is_traceable = true;  // by compiled autograd

  // `given` are those of `tensors` that are not None, which is what autograd counts.
  static variable_list forward(
      AutogradContext* ctx, at::TensorList given, const variable_list& tensors, int64_t which,
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    ctx->saved_data["which"] = which;
    ctx->saved_data["others"] =
        c10::ivalue::Tuple::create(std::vector<IValue>(stack->begin() + tensors.size(), stack->end()));
    int64_t present = 0;  // a bit for each of `tensors` that is not None
    for (size_t i = 0; i < tensors.size(); ++i) present |= int64_t(tensors[i].defined()) << i;
    ctx->saved_data["present"] = present;
    // What the backward pass does not read is not kept.
    variable_list saved = tensors;
    if (kOperators[which].bias) saved[kOperators[which].gradients] = Tensor();
    if (kOperators[which].own_transpose) saved[0] = Tensor();
    ctx->set_materialize_grads(!kOperators[which].optional_grads);
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    variable_list outputs;
    for (const IValue& output : *stack) outputs.push_back(output.toTensor());
    if (kOperators[which].from_output) saved[0] = outputs[0];
    ctx->save_for_backward(saved);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t which = ctx->saved_data["which"].toInt();
    const Operator& op = kOperators[which];
    TORCH_CHECK(op.backward, "the lightconv operators have first-order gradients only; a second order was asked for");
    const variable_list tensors = ctx->get_saved_variables();
    const auto others = ctx->saved_data["others"].toTuple();

    Stack stack;
    for (const Tensor& grad : grads) stack.push_back(op.asks() ? contiguous_channels(grad) : IValue(grad));
    for (size_t i = op.own_transpose ? 1 : 0; i < tensors.size(); ++i) {
      if (op.bias && i == op.gradients) continue;
      stack.push_back(tensors[i].defined() ? IValue(tensors[i]) : IValue());
    }
    for (const IValue& other : others->elements()) stack.push_back(other);

    variable_list gradients;  // one for each of `given`, and none for the other arguments of `forward`
    const int64_t present = ctx->saved_data["present"].toInt();
    std::vector<int64_t> place(op.gradients, -1);
    bool any = false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!(present >> i & 1)) {
        if (i < op.gradients && op.asks()) stack.emplace_back(false);
        continue;
      }
      const bool needed = ctx->needs_input_grad(gradients.size());
      if (i < op.gradients) {
        if (needed) place[i] = int64_t(gradients.size());
        if (op.asks()) stack.emplace_back(needed);
        any |= needed;
      }
      gradients.emplace_back();
      if (op.bias && i == op.gradients && needed && grads[0].defined()) {
        gradients.back() = at::sum(grads[0], at::IntArrayRef({0, 1}));
      }
    }
    if (any) {
      backward_operator(which).callBoxed(&stack);
      // It returns an empty tensor for a gradient that is not needed; autograd wants an undefined one.
      for (size_t i = 0; i < op.gradients; ++i) {
        if (place[i] >= 0) gradients[place[i]] = stack[i].toTensor();
      }
    }
    gradients.resize(gradients.size() + 5);
    return gradients;
  }
};

void autograd(int64_t which, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  bool record = false;
  if (at::GradMode::is_enabled()) {
    for (size_t i = first; i < stack->size() && !record; ++i) {
      const IValue& value = (*stack)[i];
      record = value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
    }
  }
  if (!record) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  // In every schema the tensors come first.
  variable_list tensors, given;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < count; ++i) {
    const auto& type = *arguments[i].type();
    const bool is_tensor = type.kind() == c10::TypeKind::TensorType ||
        (type.kind() == c10::TypeKind::OptionalType && type.containedType(0)->kind() == c10::TypeKind::TensorType);
    if (!is_tensor) break;
    const IValue& value = (*stack)[first + i];
    tensors.push_back(value.isTensor() ? value.toTensor() : Tensor());
    if (tensors.back().defined()) given.push_back(tensors.back());
  }
  // The callers of a boxed kernel may have values of their own below its arguments.
  Stack own(std::make_move_iterator(stack->begin() + first), std::make_move_iterator(stack->end()));
  stack->erase(stack->begin() + first, stack->end());
  for (const Tensor& output : Recorded::apply(at::TensorList(given), tensors, which, op, keys, &own)) {
    stack->push_back(output);
  }
}

// The boxed kernel of one operator.
struct Kernel : c10::OperatorKernel {
  explicit Kernel(int64_t which) : which(which) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    autograd(which, op, keys, stack);
  }
  int64_t which;
};

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, LIGHTCONV_AUTOGRAD, m) {
  for (int64_t which = 0; which < kCount; ++which) {
    m.impl(kOperators[which].name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(which)));
  }
}

}  // namespace lightconv
