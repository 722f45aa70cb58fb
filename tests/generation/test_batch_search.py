"""Which search is taken, and what each of them refuses."""

import pytest
import torch

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation import BatchSearch, SearchOptions, dtypes, mixers
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.modules.convolutions import LightweightConv
from tests.checkpoints.exports import build_model, pair

OPTIONS = SearchOptions(pad=1, unk=3, eos=2, beam_size=2)


@pytest.fixture
def model():
    return build_model(pair("dynamic"))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_kernels_torch_searches(model, dtype):
    search = BatchSearch([model], OPTIONS, dtype=dtype)
    assert isinstance(search._search, TorchSearch)
    (ranked,) = search.search(torch.tensor([[4, 5, 2]]), torch.tensor([3]), 6)
    assert len(ranked) == 2


@pytest.mark.usefixtures("no_kernels")
def test_int8_without_the_kernels_says_why(model):
    with pytest.raises(ValueError, match=r'"int8" needs .* \(there is no compiler\): use "float32" or "bfloat16"'):
        BatchSearch([model], OPTIONS, dtype="int8")


def test_int8_of_other_models_says_why(model):
    with pytest.raises(ValueError, match=r'"int8" needs .* \(a model is float64 on cpu\): use'):
        BatchSearch([model, model.double()], OPTIONS, dtype="int8")


@pytest.fixture
def own_mixer(model, monkeypatch):
    """A convolution that only the search in torch knows."""

    class Own(LightweightConv):
        def forward(self, x):
            return super().forward(x)

    monkeypatch.setitem(mixers._CONVOLUTIONS, Own, mixers._Static)
    for layer in model.decoder.layers:
        conv = layer.self_attn.conv
        layer.self_attn.conv = Own(conv.channels, 3, 2, num_heads=conv.num_heads)
    return model.eval()


def test_a_mixer_that_only_torch_knows(own_mixer, monkeypatch):
    assert isinstance(BatchSearch([own_mixer], OPTIONS)._search, TorchSearch)
    with pytest.raises(UnsupportedModelError, match="a convolution of type Own"):
        BatchSearch([own_mixer], OPTIONS, dtype="int8")
    monkeypatch.setattr(dtypes, "best", lambda instructions, size: "int8")
    assert dtypes.fastest_type([own_mixer])[0] == "float32"


@pytest.mark.usefixtures("no_kernels")
def test_auto_without_the_kernels_is_float32(model, monkeypatch):
    monkeypatch.setattr(dtypes, "instruction_set", lambda: "AVX-512 VNNI BF16")
    monkeypatch.setattr(dtypes, "best", lambda instructions, size: "int8")
    reason = "nothing else was measured without the native search (there is no compiler)"
    assert dtypes.fastest_type([model]) == ("float32", reason)


def test_wrong_arguments(model):
    with pytest.raises(ValueError, match="models must be at least one model, got none"):
        BatchSearch([], OPTIONS)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        BatchSearch([model], OPTIONS, threads=0)
