"""Which search is taken, what each of them refuses, and the options that they share."""

import contextlib
import copy
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation import BatchSearch, SearchOptions, batch_search, dtypes, mixers
from lightconv_plugin.generation.batch_search import TorchSearch, torch_threads
from lightconv_plugin.generation.finished import NoHypothesisError
from lightconv_plugin.generation.native import describe
from lightconv_plugin.generation.shortlist import Shortlist
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.modules.convolutions import LightweightConv
from tests.checkpoints.exports import build_model, pair
from tests.generation.random_models import assert_same

OPTIONS = SearchOptions(pad=1, unk=3, eos=2, beam_size=2)
INT8, AUTO = replace(OPTIONS, dtype="int8"), replace(OPTIONS, dtype="auto")


@pytest.fixture
def model():
    return build_model(pair("dynamic"))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_kernels_torch_searches(model, dtype):
    search = BatchSearch([model], replace(OPTIONS, dtype=dtype, max_len_b=6))
    assert isinstance(search._search, TorchSearch)
    (ranked,) = search.search(torch.tensor([[4, 5, 2]]))
    assert len(ranked) == 2


@pytest.mark.usefixtures("no_kernels")
def test_int8_without_the_kernels_says_why(model):
    with pytest.raises(ValueError, match=r'"int8" needs .* \(there is no compiler\): use "float32" or "bfloat16"'):
        BatchSearch([model], INT8)


def test_int8_of_other_models_says_why(model):
    with pytest.raises(ValueError, match=r'"int8" needs .* \(a model is float64 on cpu\): use'):
        BatchSearch([model, model.double()], INT8)


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
        BatchSearch([own_mixer], INT8)
    monkeypatch.setattr(dtypes, "best", lambda instructions, size: "int8")
    assert BatchSearch([own_mixer], AUTO, exported="int8").options.dtype == "float32"


@pytest.mark.usefixtures("no_kernels")
def test_auto_without_the_kernels_is_float32(model, monkeypatch):
    monkeypatch.setattr(dtypes, "instruction_set", lambda: "AVX-512 VNNI BF16")
    monkeypatch.setattr(dtypes, "best", lambda instructions, size: "int8")
    reason = "nothing else was measured without the native search (there is no compiler)"
    search = BatchSearch([model], AUTO)
    assert (search.options.dtype, search.dtype_reason) == ("float32", reason)


def test_the_models_are_described_once(model, monkeypatch):
    described = []
    monkeypatch.setattr(batch_search, "describe", lambda models: described.append(1) or describe(models))
    BatchSearch([model], AUTO, exported="int8")
    BatchSearch([model], AUTO)
    assert described == [1, 1]


@pytest.mark.parametrize("search", ["native", "torch"], indirect=True)
def test_the_number_of_threads_is_that_of_one_search(search, model, monkeypatch):
    """Torch's own number is as before: other searches and models of the process keep theirs."""
    seen, before = [], torch.get_num_threads()
    searches = [BatchSearch([model], replace(OPTIONS, max_len_b=9, threads=threads)) for threads in (2, 3, None)]
    if search == "native":
        for native in (one._search for one in searches):
            wrapped = native._search
            native._search = SimpleNamespace(search=lambda *a, to=wrapped: seen.append(a[-1]) or to.search(*a))
    else:
        start = StepModel.start
        monkeypatch.setattr(
            StepModel, "start", lambda *a, **more: seen.append(torch.get_num_threads()) or start(*a, **more)
        )
    for one in searches:
        one.search(torch.tensor([[5, 6, 7, 2], [1, 1, 9, 2]]))
        assert torch.get_num_threads() == before
    assert seen == [2, 3, before]


def test_the_number_of_threads_after_searches_at_the_same_time():
    """It is as before, also in threads of Python that begin later."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as other, contextlib.ExitStack() as here:
        here.enter_context(torch_threads(before + 1, None))
        there = torch_threads(before + 2, None)
        other.submit(there.__enter__).result()
        here.close()
        other.submit(there.__exit__, None, None, None).result()
        assert other.submit(torch.get_num_threads).result() == before
    with ThreadPoolExecutor(1) as later:
        assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == before


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_type_changes_nothing(dtype, model):
    source, options = torch.tensor([[5, 6, 7, 2], [1, 1, 9, 2]]), replace(OPTIONS, max_len_b=6)
    expected = BatchSearch([model], options).search(source)
    torch.set_default_dtype(dtype)
    try:
        found = BatchSearch([model], options).search(source)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(expected, found, "with another default type,")


@pytest.mark.usefixtures("search")
def test_weights_that_are_nan(model):
    """Also those of one model of an ensemble."""
    good = copy.deepcopy(model)
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias[0] = torch.nan
    for ensemble in ([model], [good, model], [model, good]):
        with pytest.raises(NoHypothesisError, match=r"no hypothesis of sentences \[0, 1\] of the batch has a probab"):
            BatchSearch(ensemble, OPTIONS).search(torch.tensor([[5, 6, 7, 2], [1, 1, 9, 2]]))


@pytest.mark.parametrize("search", ["native", "torch"], indirect=True)
def test_a_beam_of_all_words(search):
    small = build_model(replace(pair(), decoder=replace(pair().decoder, vocab_size=9)))
    source, options = torch.tensor([[5, 6, 7, 2]]), replace(OPTIONS, max_len_b=4)
    assert len(BatchSearch([small], replace(options, beam_size=8)).search(source)[0]) == 8
    for beam in (9, 200):
        with pytest.raises(ValueError, match=f"^beam_size must be below the 9 words of the vocabulary, got {beam}$"):
            BatchSearch([small], replace(options, beam_size=beam)).search(source)
    some = BatchSearch([small], replace(options, beam_size=5), shortlist=Shortlist({(): range(5)}))
    with pytest.raises(ValueError, match=r"^beam_size must be below the 5 words of the shortlist, got 5$"):
        some.search(source)


def test_lengths(model):
    """max_len_a·T + max_len_b words, fewer than max_len; or the longest sentence's, of words as fairseq counts them."""
    source = torch.tensor([[5, 6, 7, 2], [1, 1, 9, 2]])

    def longest(lengths=None, **options):
        wanted = replace(OPTIONS, min_len=99, **options)
        with pytest.raises(ValueError, match="`min_len` must be at most the maximum length, here ") as error:
            BatchSearch([model], wanted).search(source, lengths)
        return int(re.search(r"here (\d+),", str(error.value))[1])

    assert longest(max_len_a=1.5, max_len_b=2) == 8
    assert longest(max_len_b=70) == 63 and longest(max_len_b=70, max_len=50) == 49
    assert longest(match_source_len=True) == 3
    assert longest(torch.tensor([4, 5]), match_source_len=True) == 5
