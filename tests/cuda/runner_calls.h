// A call as host.py sends it: numbers, fractions, and tensors in memory of their own.
#pragma once

#include "common/problem.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
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

}  // namespace
