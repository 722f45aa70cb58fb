// Greedy decoding with a deployed model, without Python: decode DIR LONGEST < numbers > numbers
//
// LONGEST: the maximum number of pieces in a translation; must be less than max_target_positions in deployment.json.
// Each input line has the indices of a sentence's pieces in the source dictionary, without eos.
// Each output line has the indices of its translation in the target dictionary.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

using torch::inductor::AOTIModelPackageLoader;

constexpr int64_t pad = 1, eos = 2;  // as in deployment.json

std::vector<int64_t> translate(AOTIModelPackageLoader& start, AOTIModelPackageLoader& step, std::vector<int64_t> source,
                               size_t longest) {
  source.push_back(eos);
  std::vector<at::Tensor> state = start.run({torch::tensor(source).unsqueeze(0)});
  std::vector<int64_t> found;
  int64_t token = eos;
  while (found.size() < longest) {
    std::vector<at::Tensor> inputs = {torch::tensor({token})};
    inputs.insert(inputs.end(), state.begin(), state.end());
    std::vector<at::Tensor> outputs = step.run(inputs);
    std::copy(outputs.begin() + 1, outputs.end(), state.begin());
    outputs[0].select(1, pad).fill_(-INFINITY);
    token = outputs[0].argmax().item<int64_t>();
    if (token == eos) break;
    found.push_back(token);
  }
  return found;
}

int main(int, char** arguments) {
  c10::InferenceMode guard;
  const std::string directory = arguments[1];
  const size_t longest = std::stoul(arguments[2]);
  AOTIModelPackageLoader start(directory + "/start.pt2"), step(directory + "/step.pt2");
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    std::vector<int64_t> source;
    for (int64_t number; numbers >> number;) source.push_back(number);
    for (int64_t number : translate(start, step, source, longest)) std::cout << number << ' ';
    std::cout << std::endl;
  }
}
