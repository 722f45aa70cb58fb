// Reads calls of the launchers in cuda/*/launchers.h from standard input, runs them on the host, writes the results.
//
// Every tensor lies in memory of its exact size (the sanitizer watches both ends), or, where it says so, spread over
// pages that are never touched, so that offsets beyond 2^31 can be tested. Every call is made twice, in both orders of
// cuda_on_host.h, from the same memory: results that differ, or inputs that changed, are errors. The format, in
// little-endian 64-bit words, is host.py's.

#include "runner_parameters.h"

#include <cstring>

namespace {

template <class Params>
cudaError_t run_backward(Params p, std::size_t bytes, cudaError_t (*backward)(const Params&, cudaStream_t)) {
  p.workspace = bytes ? std::malloc(bytes) : nullptr;
  const bool ascending = lightconv_host::order == lightconv_host::Order::ascending;
  if (bytes) std::memset(p.workspace, ascending ? 0xff : 0x7f, bytes);
  const cudaError_t error = backward(p, nullptr);
  std::free(p.workspace);
  return error;
}

cudaError_t run(const Call& call, lightconv_host::Order order) {
  lightconv_host::order = order;
  if (call.numbers.count("words")) {
    return call["backward"] ? lightconv::smoothed_loss_backward(loss(call), nullptr)
                            : lightconv::smoothed_loss(loss(call), nullptr);
  }
  if (call.numbers.count("elements")) {
    return call["backward"] ? lightconv::relu_dropout_backward(relu(call), nullptr)
                            : lightconv::relu_dropout(relu(call), nullptr);
  }
  if (call.numbers.count("norm_channels")) {
    const auto p = norm(call);
    if (!call["backward"]) return lightconv::dropout_add_norm(p, nullptr);
    return run_backward(p, lightconv::norm_workspace_bytes(p), lightconv::dropout_add_norm_backward);
  }
  if (call.numbers.count("slots")) return lightconv::ring_step(ring(call), nullptr);
  if (call.numbers.count("vocabulary")) return lightconv::best_words(best(call), nullptr);
  if (call["talk"]) {
    const auto p = talk(call);
    if (!call["backward"]) return lightconv::talk_forward(p, nullptr);
    return run_backward(p, lightconv::talk_workspace_bytes(p), lightconv::talk_backward);
  }
  const auto p = convolution(call);
  if (!call["backward"]) return lightconv::forward(p, nullptr);
  return run_backward(p, lightconv::workspace_bytes(p), lightconv::backward);
}

// "" or what is wrong between the first and the second run.
std::string run_both(Call& call, cudaError_t& error) {
  for (auto order : {lightconv_host::Order::ascending, lightconv_host::Order::descending}) {
    for (auto& [key, tensor] : call.tensors)
      for (auto& segment : tensor.segments) std::memcpy(segment.at, segment.before.data(), segment.before.size());
    error = run(call, order);
    const cudaError_t left_behind = cudaGetLastError();
    if (error == cudaSuccess && left_behind != cudaSuccess)
      return std::string("a launch failed and nobody noticed: ") + cudaGetErrorString(left_behind);
    if (error != cudaSuccess) return "";
    for (auto& [key, tensor] : call.tensors) {
      for (auto& segment : tensor.segments) {
        const auto& before = tensor.writable ? segment.after : segment.before;
        const bool compare = !tensor.writable || order == lightconv_host::Order::descending;
        if (compare && std::memcmp(segment.at, before.data(), before.size()))
          return key + (tensor.writable ? " depends on the order in which threads run" : " was written to");
        if (tensor.writable) segment.after.assign(segment.at, segment.at + segment.before.size());
      }
    }
  }
  return "";
}

}  // namespace

int main() {
  for (;;) {
    std::int64_t begin;
    if (std::fread(&begin, 1, sizeof begin, stdin) != sizeof begin) return 0;
    Call call = read_call();
    lightconv_host::device = {};
    lightconv_host::device.shared_at_most = static_cast<int>(call["shared_at_most"]);
    lightconv_host::device.grid_height = static_cast<unsigned>(call["grid_height"]);
    lightconv_host::mistake = static_cast<int>(call["mistake"]);
    cudaError_t error = cudaSuccess;
    const std::string trouble = run_both(call, error);
    const std::int64_t answer[] = {error, static_cast<std::int64_t>(trouble.size())};
    put(answer, sizeof answer);
    put(trouble.data(), trouble.size());
    for (auto& [key, tensor] : call.tensors) {
      for (auto& segment : tensor.segments)
        if (tensor.writable) put(segment.at, segment.before.size());
      tensor.release();
    }
    std::fflush(stdout);
  }
}
