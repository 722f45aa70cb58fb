// The parameters of all launchers: tensors as plain pointers and strides, sizes, sequences, the device. No torch.
#pragma once

#ifdef LIGHTCONV_HOST
#include "cuda_on_host.h"
#else
#include <cuda_runtime_api.h>
#endif

#include <cstddef>
#include <cstdint>

namespace lightconv {

enum class Type : int { kFloat32, kFloat16, kBFloat16 };

// A (T, B, C) tensor whose channels are contiguous; strides in elements. `data` is null where a tensor is absent.
struct Rows {
  const void* data = nullptr;
  int64_t stride_t = 0;
  int64_t stride_b = 0;
};

struct MutableRows {
  void* data = nullptr;
  int64_t stride_t = 0;
  int64_t stride_b = 0;
};

// The seed of a launch's dropout: one element on the device or, if there is none, a number of the host's.
struct Seed {
  const int64_t* at = nullptr;
  uint64_t value = 0;
};

// The parameters of all operators: sizes, rows, sequences, the device.
struct Problem {
  Type type = Type::kFloat32;  // of every floating tensor
  int64_t steps = 0;           // T; the n new rows of a step
  int64_t batch = 0;           // B
  int channels = 0;            // C: of u and of out, so x has 2C with glu
  int heads = 1;               // H, divides C
  int state_rows = 0;          // r
  int compute_capability = 80;  // of the current device: 75, 80, 86, 90, ...

  const void* lengths = nullptr;   // (B,), int32 or int64
  bool lengths_int64 = false;
  int64_t lengths_stride = 1;
  const int32_t* cu_seqlens = nullptr;  // (sequences + 1,)
  int64_t cu_seqlens_stride = 1;
  int64_t sequences = 0;

  Rows x;
  Rows state;              // (r, B, C): values of u
  MutableRows out;         // (T, B, C); null in a backward pass
  MutableRows next_state;  // the last rows of state and u, (…, B, C); null except in a step
};

}  // namespace lightconv
