// Functions for torch's dispatcher with their arguments on a stack, which is how calls from Python and from autograd.h
// arrive. torch's own wrappers also support other calls from C++, and take seconds to compile.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lightconv {

template <class T>
T argument(const c10::IValue& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.toTensor();
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return value.isNone() ? std::nullopt : std::optional(value.toTensor());
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return value.toStringView();
  } else if constexpr (std::is_same_v<T, bool>) {
    return value.toBool();
  } else if constexpr (std::is_same_v<T, double>) {
    return value.toDouble();
  } else {
    static_assert(std::is_same_v<T, int64_t>);
    return value.toInt();
  }
}

template <class R>
void push(torch::jit::Stack& stack, R result) {
  stack.emplace_back(std::move(result));
}

template <class... R>
void push(torch::jit::Stack& stack, std::tuple<R...> results) {
  std::apply([&](auto&... each) { (stack.emplace_back(std::move(each)), ...); }, results);
}

// `behind` ≥ 0: the stack lacks the bool before the function's last `behind` arguments, which is false.
template <int behind, class R, class... A, size_t... i>
void call(R (*function)(A...), torch::jit::Stack& stack, std::index_sequence<i...>) {
  constexpr size_t lacking = behind < 0 ? sizeof...(A) : sizeof...(A) - 1 - behind;
  const auto first = stack.end() - (sizeof...(A) - (behind < 0 ? 0 : 1));
  const auto given = [&](auto at, auto* type) {
    if constexpr (at.value == lacking) {
      return false;
    } else {
      return argument<std::remove_pointer_t<decltype(type)>>(first[at.value < lacking ? at.value : at.value - 1]);
    }
  };
  R results = function(given(std::integral_constant<size_t, i>(), static_cast<std::decay_t<A>*>(nullptr))...);
  stack.erase(first, stack.end());
  push(stack, std::move(results));
}

template <int behind = -1, class R, class... A>
void call(R (*function)(A...), torch::jit::Stack& stack) {
  call<behind>(function, stack, std::index_sequence_for<A...>());
}

template <auto function>
void on_stack(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  call(function, *stack);
}

template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&on_stack<function>>();
}

// lightconv's schema is that of dynamicconv without `renorm_padding`, which is false; `behind` arguments follow it.
template <auto function, int behind>
void on_stack_of_lightconv(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  call<behind>(function, *stack);
}

template <auto function, int behind>
torch::CppFunction boxed_lightconv() {
  return torch::CppFunction::makeFromBoxedFunction<&on_stack_of_lightconv<function, behind>>();
}

// The functions have dynamicconv's arguments, and serve lightconv too.
template <auto forward, auto backward, auto step, auto step_backward>
void register_convolutions(torch::Library& m) {
  m.impl("dynamicconv", boxed<forward>());
  m.impl("dynamicconv_backward", boxed<backward>());
  m.impl("dynamicconv_step", boxed<step>());
  m.impl("dynamicconv_step_backward", boxed<step_backward>());
  m.impl("lightconv", boxed_lightconv<forward, 1>());
  m.impl("lightconv_backward", boxed_lightconv<backward, 3>());
  m.impl("lightconv_step", boxed_lightconv<step, 1>());
  m.impl("lightconv_step_backward", boxed_lightconv<step_backward, 4>());
}

}  // namespace lightconv
