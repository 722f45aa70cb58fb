// The operators of lightconv_plugin/ops/registration.py for CPU tensors, their derivatives, and the class of the beam
// search.
//
// All are registered in this file because torch's headers take longer to compile than any kernel, and no other file
// includes them. Nothing here computes, so more optimisation would only delay the first call.
#pragma GCC optimize("O1")

#include <torch/library.h>

#include "autograd.h"
#include "boxed.h"
#include "common/dropout_operator.h"
#include "common/loss_operator.h"
#include "common/residual_operator.h"
#include "convolution/operators.h"
#include "explain.h"
#include "search/engine.h"
#include "talk/operators.h"

TORCH_LIBRARY_IMPL(lightconv, CPU, m) {
  using namespace lightconv;
  register_convolutions<&conv_op, &conv_backward_op, &conv_step_op, &conv_step_backward_op>(m);
  m.impl("talkconv", boxed<&talkconv_op>());
  m.impl("talkconv_backward", boxed<&talkconv_backward_op>());
  m.impl("talkconv_step", boxed<&talkconv_step_op>());
  m.impl("talkconv_step_backward", boxed<&talkconv_step_backward_op>());
  m.impl("dropout", boxed<&dropout_op>());
  m.impl("relu_dropout", boxed<&relu_dropout_op>());
  m.impl("relu_dropout_backward", boxed<&relu_dropout_backward_op>());
  m.impl("dropout_add_norm", boxed<&dropout_add_norm_op>());
  m.impl("dropout_add_norm_backward", boxed<&dropout_add_norm_backward_op>());
  m.impl("label_smoothed_nll", boxed<&label_smoothed_nll_op>());
  m.impl("label_smoothed_nll_backward", boxed<&label_smoothed_nll_backward_op>());
  m.impl("explain", boxed<&explain_op>());
  m.impl("last_path", boxed<&last_path_op>());
}

TORCH_LIBRARY_FRAGMENT(lightconv, m) {
  using lightconv::decoding::BeamSearch;
  m.class_<BeamSearch>("BeamSearch")
      .def(torch::init<const c10::Dict<std::string, double>&, std::vector<int64_t>, const std::string&, bool>())
      .def("add_model", &BeamSearch::add_model)
      .def("search", &BeamSearch::search);
}
