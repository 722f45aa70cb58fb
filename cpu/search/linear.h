// Linear layers for inference, and the rows that go through them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "search/product.h"
#include "search/team.h"

namespace lightconv::decoding {

enum class Arithmetic { kFloat32, kBFloat16, kInt8 };

// The product for an arithmetic on this CPU, with or without special instructions.
Choice choose(Arithmetic arithmetic, bool instructions);

// Memory aligned to cache lines. It only grows, and its content is lost when it does.
template <class T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      memory_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
  };
  std::unique_ptr<T[], Free> memory_;
  int64_t capacity_ = 0;
};

// Memory for the inputs of products, and the threads that share a product. Each search has its own.
struct Workshop {
  explicit Workshop(Team& members) : team(members) {}
  Team& team;
  Buffer<char> inputs;  // of the current product
  Buffer<float> input_scales;
  Buffer<int32_t> zeros;
  Buffer<float> words, filters, spread, gathered;  // of a Stack and its Mixers
  Buffer<int64_t> taps;
  Buffer<const float*> sources;
  Buffer<float> scores, hidden, mixed;
};

// y = x · weightᵀ + bias. Arithmetic:
//   kFloat32   unchanged
//   kBFloat16  the weight is rounded to bfloat16, and so is x if the CPU can multiply bfloat16; sums are float32
//   kInt8      8-bit weights with a scale for each output, and 8-bit inputs with a scale for each row; sums are exact
class Linear {
 public:
  Linear() = default;
  // weight (outputs, inputs) with contiguous rows, bias (outputs) or null; both are copied.
  Linear(const float* weight, const float* bias, int64_t outputs, int64_t inputs, Arithmetic arithmetic, Choice choice);

  explicit operator bool() const { return outputs_ > 0; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }

  // A layer with only these outputs, in this order: the same bits of each.
  Linear select(const int64_t* outputs, int64_t count) const;

  // x: `rows` rows, x_pitch floats apart → y: rows y_pitch floats apart.
  void operator()(const float* x, int64_t x_pitch, int64_t rows, float* y, int64_t y_pitch, Workshop& shop) const;

  // The same in two parts, to compute some outputs at a time. prepare() converts x once; the result lives in `shop`
  // until the next product. compute() computes the outputs `first` … `last` − 1, where `first` is a multiple of kPanel,
  // and writes output `first` to the beginning of y.
  Product prepare(const float* x, int64_t x_pitch, int64_t rows, Workshop& shop) const;
  void compute(Product product, float* y, int64_t y_pitch, int64_t first, int64_t last, Team& team) const;

 private:
  void allocate();
  void pack_floats(const float* weight);
  void pack_bfloat16(const float* weight);
  void pack_int8(const float* weight);

  int64_t outputs_ = 0, inputs_ = 0, panels_ = 0, group_ = 1;
  Arithmetic arithmetic_ = Arithmetic::kFloat32;
  Choice choice_{};
  // Of whole panels.
  std::vector<float> bias_, column_scales_;
  std::vector<int32_t> column_sums_;
  std::shared_ptr<char> weights_;
};

}  // namespace lightconv::decoding
