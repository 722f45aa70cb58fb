"""Training of a whole model on a GPU: its step can be captured in a CUDA graph."""

import copy

import pytest
import torch

from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules.dropout import Dropout
from tests.modules.plain_models import TrainingStep, model_of


def without_dropout(model):
    """A graph's random numbers are others than those of the same calls by themselves."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("mixer", MIXERS)
def test_cuda_graph(mixer, cuda):
    """Replayed on other batches, it trains as the step itself does."""
    model = without_dropout(model_of(mixer)).to(cuda)
    captured, plain = (TrainingStep(copy.deepcopy(model)) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    plain()
    for seed in range(3):
        captured.load(seed)
        graph.replay()
        plain.load(seed)
        plain()
    for found, expected in zip(captured.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
