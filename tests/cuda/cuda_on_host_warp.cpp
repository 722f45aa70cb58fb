// What the lanes of a warp do together, in cuda_on_host.h: the last of them to arrive does it for all.

#include <string>

#include "cuda_on_host.h"

namespace lightconv_host {

void shuffle(Exchange* lanes[32], const Site&) {
  for (int i = 0; i < 32; ++i) {
    if (!lanes[i]) continue;
    const Exchange* from = lanes[lanes[i]->source];
    if (from) std::memcpy(lanes[i]->out, from->in, lanes[i]->bytes);
    // A lane that is not there answers anything.
    else
      std::memset(lanes[i]->out, order == Order::ascending ? 0xff : 0x7f, lanes[i]->bytes);
  }
}

void ballot(Exchange* lanes[32], const Site&) {
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i)
    if (lanes[i] && *static_cast<const bool*>(lanes[i]->in)) votes |= 1u << i;
  for (int i = 0; i < 32; ++i)
    if (lanes[i]) *static_cast<unsigned*>(lanes[i]->out) = votes;
}

// ------------------------------------------------------------------------------------------------ matrices

namespace {

struct Fragments {
  std::uint32_t a[4], b[2];
  float c[4], d[4];
  bool bf16;
};

LIGHTCONV_HOST_OWN_MEMORY float element(std::uint32_t pair, int which, bool bf16) {
  const auto half = static_cast<std::uint16_t>(pair >> (16 * which));
  return bf16 ? bfloat16_to_float(half) : half_to_float(half);
}

LIGHTCONV_HOST_OWN_MEMORY void multiply(Exchange* lanes[32], const Site& site) {
  float a[16][16], b[16][8];
  const bool bf16 = static_cast<const Fragments*>(lanes[0]->in)->bf16;
  for (int l = 0; l < 32; ++l) {
    const auto& f = *static_cast<const Fragments*>(lanes[l]->in);
    if (f.bf16 != bf16) fail("lanes disagree about the type of mma_m16n8k16 at " + where(site));
    const int group = l / 4, pair = l % 4 * 2;
    for (int e = 0; e < 2; ++e) {
      for (int i = 0; i < 4; ++i) a[group + i % 2 * 8][pair + e + i / 2 * 8] = element(f.a[i], e, bf16);
      for (int i = 0; i < 2; ++i) b[pair + e + i * 8][group] = element(f.b[i], e, bf16);
    }
  }
  for (int l = 0; l < 32; ++l) {
    auto& f = *static_cast<Fragments*>(lanes[l]->out);
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      float sum = f.c[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      f.d[i] = sum;
    }
  }
}

// ldmatrix: in and out are the lane's row and its registers; matrices = bytes / 4.
template <bool transposed>
void load_matrices(Exchange* lanes[32], const Site& site) {
  const int matrices = static_cast<int>(lanes[0]->bytes / 4);
  for (int l = 0; l < matrices * 8; ++l) must_be_shared(lanes[l]->in, 16, "ldmatrix", site);
  for (int l = 0; l < 32; ++l) {
    for (int m = 0; m < matrices; ++m) {
      std::uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int row = transposed ? l % 4 * 2 + e : l / 4, column = transposed ? l / 4 : l % 4 * 2 + e;
        std::memcpy(&pair[e], static_cast<const char*>(lanes[m * 8 + row]->in) + column * 2, 2);
      }
      static_cast<std::uint32_t*>(lanes[l]->out)[m] = pair[0] | std::uint32_t{pair[1]} << 16;
    }
  }
}

void ldmatrix(std::uint32_t* r, int matrices, const void* row, bool transposed, const Site& site) {
  Exchange mine{row, r, static_cast<std::size_t>(matrices) * 4, 0};
  if (transposed)
    collective("ldmatrix.trans", full_warp, load_matrices<true>, &mine, site);
  else
    collective("ldmatrix", full_warp, load_matrices<false>, &mine, site);
}

}  // namespace

void mma_m16n8k16(float d[4], const std::uint32_t a[4], const std::uint32_t b[2], const float c[4], bool bf16,
                  const Site& site) {
  Fragments f;
  std::memcpy(f.a, a, sizeof f.a);
  std::memcpy(f.b, b, sizeof f.b);
  std::memcpy(f.c, c, sizeof f.c);
  f.bf16 = bf16;
  Exchange mine{&f, &f, sizeof f, 0};
  collective("mma_m16n8k16", full_warp, multiply, &mine, site);
  std::memcpy(d, f.d, sizeof f.d);
}

void ldmatrix_x4(std::uint32_t r[4], const void* row, bool transposed, const Site& site) {
  ldmatrix(r, 4, row, transposed, site);
}

void ldmatrix_x2(std::uint32_t r[2], const void* row, bool transposed, const Site& site) {
  ldmatrix(r, 2, row, transposed, site);
}

}  // namespace lightconv_host
