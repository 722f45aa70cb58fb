// out[t, b, c] = bias[c] + Σ_k w[t, b, h, k] · u[t + offset + k, b, c] for heads narrower than a vector, tile by tile.
//
// A tile is up to 128 outputs of one sentence for some heads. Its sources are read once into the core's cache (widened,
// gated), its filters are normalised and dropped next to them, and the band product (band.h) runs on those. The only
// traffic is reading 2·T·B·C elements (and the weights), writing T·B·C, and the halo of K − 1 rows of each tile.

#include "common/parallel.h"
#include "convolution/depthwise.h"
#include "convolution/kernels.h"

namespace lightconv {
namespace {

// The tile's part of the last rows of state and inputs, which the next step needs.
template <class T>
void write_next_state(const Problem<T>& p, const Tile& tile, Arena& arena) {
  const int64_t first = p.sources() - p.next_rows, b = tile.sequence->batch;
  const int64_t n = tile.heads() * p.per_head, c = tile.head * p.per_head;
  Sum<T>* gated = arena.take<Sum<T>>(n);
  for (int64_t s = std::max(first, tile.begin); s < tile.end; ++s) {
    T* to = p.next.at(s - first, b) + c;
    if (s < p.seen) {
      std::memcpy(to, p.state.at(s, b) + c, n * sizeof(T));
    } else {
      const T* x = p.x.at(s - p.seen, b) + c;
      if (!p.glu) {
        std::memcpy(to, x, n * sizeof(T));
      } else {
        widen_row(x, n, gated);
        gate_row<T>(gated, x + p.channels(), n);
        narrow_row(gated, n, to);
      }
    }
  }
}

template <class T>
void forward_tile(const Problem<T>& p, const Tile& tile, Arena& arena) {
  using S = Sum<T>;
  if (p.next.data) write_next_state(p, tile, arena);
  const Sequence& s = *tile.sequence;
  const int64_t begin = std::max(tile.begin - p.seen, s.out_first), end = std::min(tile.end - p.seen, s.out_last);
  if (begin >= end) return;
  const int64_t pitch = p.channel_pitch(), width = tile.heads() * pitch;
  const Filters<T> filters(p, tile, begin, end, false, arena);
  // Of a filter longer than the sequence, some taps meet no source of any output.
  const Inside taps = p.meeting(begin, end, s.in_first, s.in_last);
  const int64_t last = end + p.offset + taps.last - 1;
  const Rows<S> source = stage_sources(p, tile, begin + p.offset + taps.first, last, arena);

  Rows<S> out{nullptr, round_up<S>(width) + kWidth<S>, begin};
  out.data = arena.take<S>(round_up<S>(end - begin) * out.pitch);

  const auto bias = [&](int64_t h) { return p.bias ? p.bias + (tile.head + h) * pitch : nullptr; };
  if (p.path == &kDepthwise) {
    S* start = nullptr;
    if (p.bias) {
      start = arena.take<S>(round_up<S>(width));
      std::copy(bias(0), bias(0) + width, start);
    }
    convolve_each<S, false>(
        out, begin, end, source, s.in_first, s.in_last, channel_taps(p, tile, filters, arena), p.kernel_size, p.offset,
        start);
  } else {
    const Columns<S> sources = transposed(source, last, width, kWidth<S>, arena);
    Columns<S> results{nullptr, round_up<S>(end - begin) + kWidth<S>, begin};
    results.data = arena.take<S>(round_up<S>(width) * results.pitch);
    for (int64_t h = 0; h < tile.heads(); ++h) {
      const auto head = [&](Columns<S> c) { return Columns<S>{c.data + h * pitch * c.pitch, c.pitch, c.first}; };
      convolve_narrow<false>(p, tile, filters, h, head(results), begin, end, head(sources), taps, bias(h), arena);
    }
    transpose(results.data, results.pitch, out.data, out.pitch, width, end - begin);
  }
  for (int64_t t = begin; t < end; ++t) {
    narrow_row(out.at(t), width, p.out.at(t, s.batch) + tile.head * p.per_head);
  }
}

}  // namespace

template <class T>
void tile_forward(const Problem<T>& p) {
  const Cut work = cut(p, /*planes=*/2, /*tables=*/1);
  parallel_for(0, int64_t(work.tiles.size()), work.grain(), p.threads, [&](int64_t from, int64_t to) {
    with_scratch(from, to, [&](int64_t i, Arena& arena) { forward_tile(p, work.tiles[i], arena); });
  });
}

template void tile_forward(const Problem<float>&);
template void tile_forward(const Problem<double>&);
template void tile_forward(const Problem<Float16>&);
template void tile_forward(const Problem<BFloat16>&);

}  // namespace lightconv
