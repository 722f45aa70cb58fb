// What the passes of all operators work on: views of tensors, sequences, and the tiles into which the work is divided.
//
// Sources have one time axis: first the `seen` rows of a state (step functions only), then the rows of x. Output t is
// at source row t + seen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace lightconv {

// A (time, batch, channels) tensor with contiguous channels.
template <class T>
struct View {
  T* data = nullptr;
  int64_t time = 0, batch = 0;

  T* at(int64_t t, int64_t b) const { return data + t * time + b * batch; }
};

// Filters (T, B, H, K), or (H, K) with the first two strides 0, whose taps are contiguous; or offsets (T, B, H).
template <class T>
struct FilterView {
  T* data = nullptr;
  int64_t time = 0, batch = 0, head = 0;

  T* at(int64_t t, int64_t b, int64_t h) const { return data + t * time + b * batch + h * head; }
};

// Rows of one sentence (or packed sequence): which sources can be read and which outputs exist.
struct Sequence {
  int64_t batch;
  int64_t in_first, in_last;    // sources
  int64_t out_first, out_last;  // outputs
};

// Source rows `begin` … `end` − 1 of a sequence, and the outputs t = row − seen, for heads `head` … `last_head` − 1.
struct Tile {
  const Sequence* sequence;
  int64_t begin, end;
  int64_t head, last_head;

  int64_t heads() const { return last_head - head; }
};

// How many pieces of `work` multiply-adds each are worth another thread.
inline int64_t grain_of(int64_t work) { return std::max<int64_t>(1, 100'000 / std::max<int64_t>(work, 1)); }

// The division depends only on sizes, never on the number of threads, and so do the results.
struct Cut {
  std::vector<Tile> tiles;
  int64_t work;  // multiply-adds of a tile, roughly

  int64_t grain() const { return grain_of(work); }
};

// Tiles of `rows` source rows and as many heads as stay in a core's second-level cache. `bytes_of_head` is what a tile
// stages for one head, `work_of_head` its multiply-adds.
inline Cut cut_into_tiles(
    const std::vector<Sequence>& sequences, int64_t seen, int64_t rows, int64_t heads, int64_t bytes_of_head,
    int64_t work_of_head) {
  constexpr int64_t kBytes = 512 * 1024;
  const int64_t most = std::clamp<int64_t>(kBytes / bytes_of_head, 1, heads);
  // Groups of equal size.
  const int64_t groups = (heads + most - 1) / most, size = (heads + groups - 1) / groups;
  Cut cut{{}, work_of_head * size};
  for (const Sequence& s : sequences) {
    // Rows that nothing reads or writes are in no tile.
    const int64_t first = std::min(s.in_first, s.out_first + seen);
    const int64_t last = std::max(s.in_last, s.out_last + seen);
    for (int64_t begin = first; begin < last; begin += rows) {
      for (int64_t h = 0; h < heads; h += size) {
        cut.tiles.push_back({&s, begin, std::min(begin + rows, last), h, std::min(h + size, heads)});
      }
    }
  }
  return cut;
}

// Rows of a tile are far apart, and each is too short for the hardware prefetcher to predict the next one.
constexpr int64_t kAhead = 8;

template <class T>
inline void fetch_ahead(const T* row, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i);
}

// Scratch memory of one thread for its current tile, reused for the next one.
class Arena {
 public:
  void reset() {
#if defined(__SANITIZE_ADDRESS__)
    blocks_.clear();
    size_ = 0;
#endif
    if (blocks_.size() > 1) {
      const int64_t total = size_;
      blocks_.clear();
      size_ = 0;
      add(total);
    }
    used_ = 0;
  }

  // Frees all memory if it is much.
  void trim() {
    if (size_ <= kKept) return;
    blocks_.clear();
    size_ = used_ = 0;
  }

  // Frees what was taken since `mark`, unless a new block has been added since (reset() frees it then).
  struct Mark {
    size_t blocks;
    int64_t used;
  };
  Mark mark() const { return {blocks_.size(), used_}; }
  void release(Mark mark) {
    if (mark.blocks == blocks_.size()) used_ = mark.used;
  }

  // `n` uninitialised elements, on cache lines that hold nothing else.
  template <class S>
  S* take(int64_t n) {
    const int64_t bytes = (n * int64_t(sizeof(S)) + kLine - 1) / kLine * kLine;
#if defined(__SANITIZE_ADDRESS__)
    // A separate block each time, so that the sanitizer notices overruns; filled with NaN, so that a read before the
    // first write changes a result.
    add(bytes);
    char *start = blocks_.back().start, *end = start + n * int64_t(sizeof(S));
    std::memset(start, 0xFF, bytes);
    __asan_poison_memory_region(end, blocks_.back().memory.get() + bytes + kLine - end);
    return reinterpret_cast<S*>(start);
#endif
    if (blocks_.empty() || used_ + bytes > blocks_.back().size) {
      add(std::max<int64_t>(bytes, int64_t(1) << 20));
      used_ = 0;
    }
    char* at = blocks_.back().start + used_;
    used_ += bytes;
    return reinterpret_cast<S*>(at);
  }

 private:
  static constexpr int64_t kLine = 64, kKept = int64_t(32) << 20;
  struct Block {
    std::unique_ptr<char[]> memory;
    char* start;
    int64_t size;
  };

  void add(int64_t bytes) {
    std::unique_ptr<char[]> memory(new char[bytes + kLine]);
    char* start = memory.get() + (kLine - reinterpret_cast<uintptr_t>(memory.get()) % kLine) % kLine;
    blocks_.push_back({std::move(memory), start, bytes});
    size_ += bytes;
  }

  std::vector<Block> blocks_;
  int64_t used_ = 0, size_ = 0;
};

// Of the calling thread, one for all passes and types: none runs inside another.
inline Arena& scratch() {
  static thread_local Arena arena;
  return arena;
}

// Calls f(i, arena) for i = from … to − 1, each with all of the calling thread's scratch memory.
template <class F>
void with_scratch(int64_t from, int64_t to, F f) {
  Arena& arena = scratch();
  for (int64_t i = from; i < to; ++i) {
    arena.reset();
    f(i, arena);
  }
  arena.trim();
}

}  // namespace lightconv
