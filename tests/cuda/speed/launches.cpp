// Prints what a call of a launcher launches, instead of launching it:
//
//     launches NAME=INTEGER …
//
// backward, type, steps, batch, channels, heads, size (K), padding, batch_first; of lightconv and dynamicconv: dynamic,
// normalize, glu, dropout, renorm; or talk, for talkconv with windows that reach as far as the K taps. What is not named
// is 0. A line for each launch: the kernel's distance from `origin` (nm gives its name), blocks, threads, bytes of shared
// memory, and the parameters in hexadecimal digits. Tensors are at made-up addresses: see `at`.

#include "convolution/launchers.h"
#include "talk/launchers.h"

#include <cstdio>
#include <map>
#include <string>

extern "C" void origin() {}

namespace {

using namespace lightconv;

void print(const void* kernel, dim3 grid, dim3 block, std::size_t shared, const std::string& parameters) {
  const auto distance = static_cast<const char*>(kernel) - reinterpret_cast<const char*>(&origin);
  std::printf("%lld %u %u %zu ", static_cast<long long>(distance), grid.x, block.x, shared);
  for (const char byte : parameters) std::printf("%02x", static_cast<unsigned char>(byte));
  std::printf("\n");
}

// The n-th tensor: x, weight, out, grad, dx, dweight, workspace, seed, right, dright; talkconv's left offsets are the
// weight.
void* at(int n) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(n + 1) << 40); }

using Numbers = std::map<std::string, int>;

void set_problem(Problem& p, Numbers& call) {
  p.type = static_cast<Type>(call["type"]);
  p.steps = call["steps"], p.batch = call["batch"], p.channels = call["channels"], p.heads = call["heads"];
  p.compute_capability = 90;
}

// The n-th tensor as rows of `width` elements.
template <class Tensor>
void set_rows(Tensor& tensor, const Problem& p, Numbers& call, int64_t width, int n) {
  tensor.data = at(n);
  tensor.stride_t = call["batch_first"] ? width : p.batch * width;
  tensor.stride_b = call["batch_first"] ? p.steps * width : width;
}

cudaError_t run_convolution(Numbers& call) {
  ConvBackwardParams p;
  set_problem(p, call);
  p.dynamic = call["dynamic"], p.kernel_size = call["size"], p.padding_l = call["padding"];
  p.normalize = static_cast<Normalize>(call["normalize"]), p.glu = call["glu"], p.renorm_padding = call["renorm"];
  set_rows(p.x, p, call, p.channels * (p.glu ? 2 : 1), 0);
  set_rows(p.weight, p, call, int64_t{p.heads} * p.kernel_size, 1);
  if (!p.dynamic) p.weight.stride_t = p.weight.stride_b = 0;
  p.weight.stride_h = p.kernel_size, p.weight.stride_k = 1;
  if (call["dropout"]) {
    p.seed.at = static_cast<const int64_t*>(at(7));
    p.drop_below = 0x19999999;  // 0.1
    p.keep_scale = 1.0f / 0.9f;
  }
  if (!call["backward"]) {
    set_rows(p.out, p, call, p.channels, 2);
    return forward(p, nullptr);
  }
  set_rows(p.grad, p, call, p.channels, 3);
  set_rows(p.dx, p, call, p.channels * (p.glu ? 2 : 1), 4);
  p.dweight = at(5);
  p.dweight_stride_t = p.weight.stride_t, p.dweight_stride_b = p.weight.stride_b;
  p.dweight_stride_h = p.weight.stride_h, p.dweight_stride_k = p.weight.stride_k;
  p.workspace = at(6);
  return backward(p, nullptr);
}

cudaError_t run_talk(Numbers& call) {
  TalkBackwardParams p;
  set_problem(p, call);
  p.max_left = call["padding"], p.max_right = call["size"] - 1 - call["padding"];
  const auto set_offsets = [&](auto& tensor, int n) {
    set_rows(tensor, p, call, p.heads, n);
    tensor.stride_h = 1;
  };
  set_rows(p.x, p, call, p.channels, 0);
  set_offsets(p.left, 1);
  if (p.max_right > 0) set_offsets(p.right, 8);
  if (!call["backward"]) {
    set_rows(p.out, p, call, p.channels, 2);
    return talk_forward(p, nullptr);
  }
  set_rows(p.grad, p, call, p.channels, 3);
  set_rows(p.dx, p, call, p.channels, 4);
  set_offsets(p.dleft, 5);
  if (p.max_right > 0) set_offsets(p.dright, 9);
  p.workspace = at(6);
  return talk_backward(p, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  Numbers call;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto equals = argument.find('=');
    if (equals == std::string::npos) return std::fprintf(stderr, "NAME=INTEGER, got %s\n", argv[i]), 2;
    call[argument.substr(0, equals)] = std::stoi(argument.substr(equals + 1));
  }
  lightconv_host::launched = print;
  const cudaError_t error = call["talk"] ? run_talk(call) : run_convolution(call);
  if (error != cudaSuccess) return std::fprintf(stderr, "cudaError_t %d\n", static_cast<int>(error)), 1;
}
