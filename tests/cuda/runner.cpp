// Reads calls of the launchers in cuda/*/launchers.h from standard input, runs them on the host, writes the results.
//
// Every tensor lies in memory of its exact size (the sanitizer watches both ends), or, where it says so, spread over
// pages that are never touched, so that offsets beyond 2^31 can be tested. Every call is made twice, in both orders of
// cuda_on_host.h, from the same memory: results that differ, or inputs that changed, are errors. The format, in
// little-endian 64-bit words, is host.py's.

#include "convolution/launchers.h"
#include "dropout/launchers.h"
#include "loss/launchers.h"
#include "talk/launchers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (void)(address)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (void)(address)
#endif

namespace {

[[noreturn]] void stop(const char* why) {
  std::fprintf(stderr, "runner: %s\n", why);
  std::exit(97);
}

void get(void* to, std::size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) stop("input ends within a call");
}

std::int64_t word() {
  std::int64_t value;
  get(&value, sizeof value);
  return value;
}

std::string name() {
  std::string text(static_cast<std::size_t>(word()), '\0');
  get(text.data(), text.size());
  return text;
}

void put(const void* from, std::size_t bytes) {
  if (std::fwrite(from, 1, bytes, stdout) != bytes) stop("cannot write results");
}

// The part of a tensor's memory that holds something, and what it held before the call.
struct Segment {
  char* at;
  std::vector<char> before, after;
};

struct Tensor {
  char* block = nullptr;  // what was allocated
  char* data = nullptr;   // where the tensor begins in it
  std::size_t bytes = 0, lead = 0;
  std::int64_t strides[4] = {};
  bool writable = false, sparse = false;
  std::vector<Segment> segments;

  void allocate() {
    if (sparse) {
      void* memory =
          mmap(nullptr, lead + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) stop("no address space for a sparse tensor");
      block = static_cast<char*>(memory);
    } else {
      block = static_cast<char*>(std::malloc(lead + bytes));
      if (!block) stop("no memory for a tensor");
      ASAN_POISON_MEMORY_REGION(block, lead);
    }
    data = block + lead;
  }

  void release() {
    if (sparse) {
      munmap(block, lead + bytes);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(block, lead);
      std::free(block);
    }
  }
};

struct Call {
  std::map<std::string, std::int64_t> numbers;
  std::map<std::string, double> fractions;
  std::map<std::string, Tensor> tensors;

  std::int64_t operator[](const char* key) const { return numbers.at(key); }

  const Tensor* tensor(const char* key) const {
    const auto found = tensors.find(key);
    return found == tensors.end() ? nullptr : &found->second;
  }
  void* pointer(const char* key) const {
    const Tensor* found = tensor(key);
    return found ? found->data : nullptr;
  }
  lightconv::MutableRows rows(const char* key) const {
    const Tensor* found = tensor(key);
    if (!found) return {};
    return {found->data, found->strides[0], found->strides[1]};
  }
  lightconv::Rows const_rows(const char* key) const {
    const auto [data, stride_t, stride_b] = rows(key);
    return {data, stride_t, stride_b};
  }
};

Tensor read_tensor() {
  Tensor tensor;
  tensor.writable = word();
  tensor.sparse = word();
  tensor.lead = static_cast<std::size_t>(word());
  tensor.bytes = static_cast<std::size_t>(word());
  for (auto& stride : tensor.strides) stride = word();
  tensor.allocate();
  const auto segments = word();
  for (std::int64_t i = 0; i < segments; ++i) {
    const std::int64_t offset = word(), bytes = word();
    if (bytes == 0) continue;
    Segment segment{tensor.data + offset, std::vector<char>(static_cast<std::size_t>(bytes)), {}};
    get(segment.before.data(), segment.before.size());
    tensor.segments.push_back(std::move(segment));
  }
  return tensor;
}

Call read_call() {
  Call call;
  for (auto count = word(); count > 0; --count) {
    const std::string key = name();
    call.numbers[key] = word();
  }
  for (auto count = word(); count > 0; --count) {
    const std::string key = name();
    get(&call.fractions[key], sizeof(double));
  }
  for (auto count = word(); count > 0; --count) {
    const std::string key = name();
    call.tensors[key] = read_tensor();
  }
  return call;
}

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
