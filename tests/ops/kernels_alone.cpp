// The CPU kernels without torch: reads problems, writes results (test_other_cpus.py has the format).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "convolution/kernels.h"
#include "talk/problem.h"

using namespace lightconv;

namespace {

// What a problem begins with; then come `batch` lengths, and the tensors.
struct Header {
  int64_t operation, type, steps, batch, heads, per_head, kernel_size, padding, glu, renorm, normalize, threads, seed, threshold;
  double scale;
};

void read_into(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

template <class T>
std::vector<T> read_tensor(int64_t n) {
  std::vector<T> values(n);
  read_into(values.data(), n * sizeof(T));
  return values;
}

template <class T>
void write_tensor(const std::vector<T>& values) {
  if (std::fwrite(values.data(), sizeof(T), values.size(), stdout) != values.size()) std::exit(4);
}

std::vector<Sequence> sequences(const Header& h, const std::vector<int64_t>& lengths) {
  std::vector<Sequence> found;
  for (int64_t b = 0; b < h.batch; ++b) found.push_back({b, 0, lengths[b], 0, h.steps});
  return found;
}

template <class T>
View<T> rows(std::vector<std::remove_const_t<T>>& values, int64_t batch, int64_t channels) {
  return {values.data(), batch * channels, channels};
}

template <class T>
void convolution(const Header& h, const std::vector<int64_t>& lengths) {
  const int64_t c = h.heads * h.per_head, width = h.glu ? 2 * c : c, positions = h.steps * h.batch;
  const bool shared = h.operation == 0;
  const int64_t filter = h.heads * h.kernel_size;
  auto x = read_tensor<T>(positions * width), weight = read_tensor<T>(shared ? filter : positions * filter);
  auto grad = read_tensor<T>(positions * c);
  std::vector<T> out(positions * c), dx(x.size()), dweight(weight.size());

  Problem<T> p;
  p.steps = h.steps, p.batch = h.batch, p.heads = h.heads, p.per_head = h.per_head, p.kernel_size = h.kernel_size;
  p.offset = -h.padding;
  p.threads = int(h.threads);
  p.glu = h.glu, p.renorm = h.renorm, p.normalize = Normalize(h.normalize);
  if (h.threshold) p.dropout = {uint64_t(h.seed), uint64_t(h.threshold), h.scale};
  p.shared = shared;
  p.sequences = sequences(h, lengths);
  const auto strides = [&](auto* data) {
    return FilterView<std::remove_pointer_t<decltype(data)>>{
        data, shared ? 0 : h.batch * filter, shared ? 0 : filter, h.kernel_size};
  };
  p.x = rows<const T>(x, h.batch, width);
  p.weight = strides(static_cast<const T*>(weight.data()));
  Problem<T> back = p;
  p.out = rows<T>(out, h.batch, c);
  run_forward(p);
  back.grad = rows<const T>(grad, h.batch, c);
  back.dx = rows<T>(dx, h.batch, width);
  back.dweight = strides(dweight.data());
  run_backward(back);
  write_tensor(out), write_tensor(dx), write_tensor(dweight);
}

template <class T>
void talk(const Header& h, const std::vector<int64_t>& lengths) {
  const int64_t c = h.heads * h.per_head, positions = h.steps * h.batch;
  auto x = read_tensor<T>(positions * c), left = read_tensor<T>(positions * h.heads);
  auto right = read_tensor<T>(positions * h.heads), grad = read_tensor<T>(positions * c);
  std::vector<T> out(positions * c), dx(positions * c), dleft(left.size()), dright(right.size());

  TalkProblem<T> p;
  p.steps = h.steps, p.batch = h.batch, p.heads = h.heads, p.per_head = h.per_head;
  p.max_left = h.kernel_size, p.max_right = h.padding;
  p.threads = int(h.threads);
  p.sequences = sequences(h, lengths);
  const auto strides = [&](auto* data) {
    return FilterView<std::remove_pointer_t<decltype(data)>>{data, h.batch * h.heads, h.heads, 1};
  };
  p.x = rows<const T>(x, h.batch, c);
  p.left = strides(static_cast<const T*>(left.data())), p.right = strides(static_cast<const T*>(right.data()));
  TalkProblem<T> back = p;
  p.out = rows<T>(out, h.batch, c);
  talk_forward(p);
  back.grad = rows<const T>(grad, h.batch, c);
  back.dx = rows<T>(dx, h.batch, c);
  back.dleft = strides(dleft.data()), back.dright = strides(dright.data());
  talk_backward(back);
  write_tensor(out), write_tensor(dx), write_tensor(dleft), write_tensor(dright);
}

template <class T>
void run(const Header& h, const std::vector<int64_t>& lengths) {
  h.operation == 2 ? talk<T>(h, lengths) : convolution<T>(h, lengths);
}

}  // namespace

int main() {
  int64_t count;
  read_into(&count, sizeof(count));
  for (; count > 0; --count) {
    Header h;
    read_into(&h, sizeof(h));
    const auto lengths = read_tensor<int64_t>(h.batch);
    switch (h.type) {
      case 0: run<float>(h, lengths); break;
      case 1: run<double>(h, lengths); break;
      case 2: run<Float16>(h, lengths); break;
      case 3: run<BFloat16>(h, lengths); break;
      default: return 2;
    }
  }
}
