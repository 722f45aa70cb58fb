"""What a search, mostly the native one, does with wrong input and wrong weights: one clear error, never a crash."""

import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightconv_plugin.errors import TranslationError, UnsupportedModelError
from lightconv_plugin.generation import DTYPES, BatchSearch, SearchOptions, Translator
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.finished import NoHypothesisError
from lightconv_plugin.generation.native import NativeSearch, describe
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules import AdaptiveInputConfig, AdaptiveSoftmaxConfig, ModelConfig
from lightconv_plugin.ops import backends
from tests.checkpoints.exports import DIM, WORDS, build_model, export, mixer, pair, stack
from tests.generation import random_models as models
from tests.robustness.torture import Fork

pytestmark = pytest.mark.skipif(backends.decision("cpu").backend != "cpu", reason="no native kernels")

OPTIONS = SearchOptions(pad=1, unk=3, eos=2, beam_size=2)
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 1, 1]])
NOTHING = r"no hypothesis of sentences \[0, 1\] of the batch has a probability above 0"


def search(
    model, source=SOURCE, *, max_len=4, options=OPTIONS, lengths=None, kind=models.native_search, threads=2, **extra
):
    if lengths is None:
        lengths = source.ne(1).sum(dim=1)
    ensemble = model if isinstance(model, list) else [model]
    with torch.no_grad():
        return kind(ensemble, replace(options, threads=threads)).search(source, lengths, max_len, **extra)


@pytest.fixture(scope="module")
def model():
    return build_model(pair())


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("word", [-1, WORDS, 2**40])
@pytest.mark.parametrize("threads", [1, 2])
def test_words_out_of_range(word, threads, model):
    wrong = SOURCE.clone()
    wrong[1, 1] = word
    message = f"must be words in 0 … {WORDS - 1}, got {word}$"
    with pytest.raises(ValueError, match=f"^source {message}"):
        search(model, wrong, threads=threads)
    with pytest.raises(ValueError, match=f"^prefix {message}"):
        search(model, threads=threads, prefix=torch.tensor([[5], [word]]))
    with pytest.raises(ValueError, match=f"^begin {message}"):
        search(model, threads=threads, begin=word)


@pytest.mark.parametrize("name", ["pad", "unk", "eos", "suppress"])
@pytest.mark.parametrize("word", [-1, WORDS])
def test_symbols_out_of_range(name, word, model):
    options = replace(OPTIONS, **{name: (5, word) if name == "suppress" else word})
    with pytest.raises(ValueError, match=f"^{name} must be words in 0 … {WORDS - 1}, got {word}$"):
        search(model, options=options)


def test_numbers_out_of_range(model):
    with pytest.raises(ValueError, match=r"^beam_size must be at least 1, got 0$"):
        search(model, options=replace(OPTIONS, beam_size=0))
    with pytest.raises(ValueError, match=r"^max_len must be at least 0, got -1$"):
        search(model, max_len=-1)


@pytest.mark.parametrize("max_len", [2**40, 2**61, 2**62, 2**63 - 3, 2**63 - 1])
def test_tables_beyond_any_memory(max_len, model):
    """Their sizes would overflow."""
    most = 2**40 // (len(SOURCE) * OPTIONS.beam_size) - 2
    with pytest.raises(ValueError, match=f"^max_len must be at most {most} for 4 hypotheses, got {max_len}$"):
        search(model, max_len=max_len)
    assert search(model, torch.empty(0, 5, dtype=torch.int64), max_len=max_len) == []


def test_arguments_of_the_wrong_shape(model):
    with pytest.raises(ValueError, match=r"source must be \(S, T\), got \[5\]"):
        search(model, SOURCE[0], lengths=torch.tensor([5]))
    with pytest.raises(ValueError, match=r"lengths must be .* with an entry for each of 2 sentences"):
        search(model, lengths=torch.tensor([5]))
    with pytest.raises(ValueError, match=r"prefix must be \(S, P\), got \[2\]"):
        search(model, prefix=torch.tensor([5, 6]))
    with pytest.raises(ValueError, match=r"prefix must be .* with an entry for each of 2 sentences"):
        search(model, prefix=torch.tensor([[5]]))


def test_any_integers_are_words(model):
    expected = search(model)
    models.assert_equal(expected, search(model, SOURCE.int(), prefix=torch.empty(2, 0, dtype=torch.int32)))


def test_an_empty_batch(model):
    nothing = torch.empty(0, 5, dtype=torch.int64)
    assert search(model, nothing) == []
    assert BatchSearch([model], OPTIONS).search(nothing) == []


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_sentence_without_words(threads, model):
    wrong = torch.cat([SOURCE, torch.ones_like(SOURCE[:1]), SOURCE])
    with pytest.raises(ValueError, match=r"^sentence 2 of the batch has no words$"):
        search(model, wrong, threads=threads)
    with pytest.raises(ValueError, match=r"^sentence 0 of the batch has no words$"):
        search(model, torch.empty(3, 0, dtype=torch.int64), threads=threads)


@pytest.mark.parametrize("kind", MIXERS)
def test_pads_within_a_sentence(kind):
    model = build_model(pair(kind))
    source = torch.tensor([[5, 1, 7, 8, 2], [1, 9, 1, 1, 2], [5, 6, 7, 8, 2], [5, 2, 1, 1, 1]])
    expected = search(model, source, kind=TorchSearch)
    for threads in (1, 2, 5):
        models.assert_same(expected, search(model, source, threads=threads))
    models.assert_equal(search(model, source)[:1], search(model, source[:1]))
    without = search(model, torch.tensor([[5, 7, 8, 2]]))[0][0]["score"]
    # A convolution sees that something is between the words; attention and its positions pass over pads.
    assert torch.isclose(expected[0][0]["score"], without, rtol=1e-5) == (kind == "attention")


def test_a_beam_of_all_words(model):
    small = build_model(replace(pair(), decoder=replace(pair().decoder, vocab_size=9)))
    most = replace(OPTIONS, beam_size=8)
    models.assert_same(search(small, options=most, kind=TorchSearch), search(small, options=most))
    for beam in (9, 200):
        with pytest.raises(ValueError, match=f"^beam_size must be below the 9 words of the vocabulary, got {beam}$"):
            search(small, options=replace(OPTIONS, beam_size=beam))


def test_models_of_different_vocabularies(model):
    other = build_model(replace(pair(), decoder=replace(pair().decoder, vocab_size=WORDS + 1)))
    with pytest.raises(ValueError, match=r"^the models have different vocabularies$"):
        search([model, other])


@pytest.mark.parametrize("kind", [models.native_search, TorchSearch])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sequences_beyond_the_learned_positions(threads, kind):
    model = build_model(pair(positions="learned", max_positions=6))
    assert len(search(model, torch.full((2, 6), 5), max_len=5, kind=kind, threads=threads)) == 2
    with pytest.raises(ValueError, match=r"^a sequence of 7 tokens is longer than the 6 learned positions$"):
        search(model, torch.full((2, 7), 5), kind=kind, threads=threads)
    options = replace(OPTIONS, min_len=9)
    with pytest.raises(ValueError, match=r"^a sequence of 7 tokens is longer than the 6 learned positions$"):
        search(model, max_len=9, options=options, kind=kind, threads=threads)


def test_nothing_possible(model):
    everything = replace(OPTIONS, suppress=tuple(range(WORDS)))
    for kind in (models.native_search, TorchSearch):
        with pytest.raises(NoHypothesisError, match=NOTHING):
            search(model, options=everything, kind=kind)


def test_wrong_threads_and_types(model):
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        search(model, threads=0)
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or int8, got float16"):
        models.native_search([model], replace(OPTIONS, dtype="float16"))


def _at_a_limit(options) -> None:
    """With a gibibyte more than what is in use; prints the error. The same search as before it still runs."""
    model = build_model(pair())
    expected = search(model)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        search(model, **options)
    except RuntimeError as error:
        print(type(error).__name__, error)
    models.assert_equal(expected, search(model))


LIMITS = {
    "threads": ({"threads": 2000}, "RuntimeError cannot start 2000 threads: "),  # the stacks of a hundred fit
    "memory": ({"max_len": 10**8}, "OutOfMemoryError out of memory in the search"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("options, message", LIMITS.values(), ids=LIMITS)
def test_more_than_the_system_gives(options, message, tmp_path):
    child = Fork(_at_a_limit, options, log=tmp_path / "log", token="")
    assert child.wait() == 0 and (tmp_path / "log").read_text().startswith(message), (tmp_path / "log").read_text()


# ------------------------------------------------------------------------------------------------ models


def test_models_that_are_not_covered(tmp_path):
    bands = (40, 100)
    plain = pair()
    adaptive = {"share_input_output": False, "adaptive_softmax": AdaptiveSoftmaxConfig(bands)}
    model = build_model(replace(plain, decoder=replace(plain.decoder, **adaptive)))
    with pytest.raises(UnsupportedModelError, match="adaptive softmax"):
        BatchSearch([model], OPTIONS)
    said = r"model cannot be used to translate: an adaptive softmax \(adaptive_softmax_cutoff\) is not supported$"
    with pytest.raises(TranslationError, match=said):
        Translator(export(tmp_path / "model", model))
    config = replace(plain, decoder=stack(encoder_dim=DIM, adaptive_input=AdaptiveInputConfig(bands)))
    with pytest.raises(UnsupportedModelError, match="adaptive_input"):
        BatchSearch([build_model(config)], OPTIONS)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("decoder.layers.0.activation", "sine"),
        ("decoder.layers.0.mixer.kind", "decay"),
        ("encoder.layers.1.mixer.normalize", "sum"),
        ("encoder.positions", "rotary"),
    ],
)
def test_words_that_the_kernels_do_not_know(entry, word, model):
    (description,) = describe([model])
    description.numbers[entry] = word
    with pytest.raises(ValueError, match=f"^{entry} {word} is unknown to the native search$"):
        NativeSearch([description], OPTIONS)


def _broken(kind, value, entries):
    """(name of a parameter, a model of which these entries of it are `value`), for all parameters of a small model."""
    sizes = {"embed_dim": 16, "ffn_dim": 24, "positions": "learned", "embedding_norm": True}
    decoder, encoder = ((mixer(kind, 16, causal=causal),) * 2 for causal in (True, False))
    model = build_model(
        ModelConfig(stack(mixers=decoder, encoder_dim=16, output_bias=True, **sizes), stack(mixers=encoder, **sizes))
    )
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[entries] = value
        yield name, model
        with torch.no_grad():
            parameter.copy_(before)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_single_nan(kind):
    """Hypotheses that it reaches are impossible, others are found, as by the search in torch."""
    found = []
    for name, model in _broken(kind, float("nan"), -3):
        # Without pads, which the search in torch lets reach the words beside them.
        case = models.Case([model], OPTIONS, torch.tensor([[5, 6, 7, 8, 2], [9, 106, 4, 4, 2]]), 4)
        found.append(case.search(models.native_search, threads=1))
        if "q_proj" in name or "k_proj" in name:  # torch's attention loses it among its exponentials
            assert isinstance(found[-1], str), name
        else:
            models.assert_same(case.search(TorchSearch), found[-1], f"{name}:")
    assert any(isinstance(one, str) for one in found) and any(isinstance(one, list) for one in found)


@pytest.mark.parametrize("first, value", [(0, float("inf")), (1, -float("inf")), (2, 3e38)])
@pytest.mark.parametrize("kind", MIXERS)
def test_infinities_and_numbers_that_become_them(kind, first, value):
    """Which products overflow is a matter of their order: the search in torch may find something else."""
    for number, (name, model) in enumerate(_broken(kind, value, -3), first):
        dtype = DTYPES[number % len(DTYPES)]  # all of them for each parameter, with one value each
        found = models.Case([model], OPTIONS, SOURCE, 4).search(models.native_search, dtype=dtype, threads=1)
        assert len(found) == 2 or found.startswith("no hypothesis of sentences ["), f"{name}, {dtype}: {found}"


@pytest.mark.parametrize("kind", MIXERS)
def test_weights_of_nothing_but_nan(kind):
    first = list(MIXERS).index(kind)
    for number, (name, model) in enumerate(_broken(kind, float("nan"), slice(None)), first):
        dtype = DTYPES[number % len(DTYPES)]  # that of a parameter differs from mixer to mixer
        found = models.Case([model], OPTIONS, SOURCE, 4).search(models.native_search, dtype=dtype, threads=2)
        assert found == "no hypothesis of sentences [0, 1] of the batch has a probability above 0", name


@pytest.mark.parametrize("forbidden", [slice(0, 1024), slice(4, 1400), slice(1030, 1500)])
def test_words_whose_bias_is_minus_infinity(forbidden):
    """They are impossible; all others keep their probabilities, wherever they lie."""
    config = pair()
    decoder = replace(config.decoder, vocab_size=1500, output_bias=True)
    model = build_model(replace(config, decoder=decoder))
    options = replace(OPTIONS, eos=1029, beam_size=3)
    with torch.no_grad():
        model.decoder.output_bias[forbidden] = -torch.inf
        model.decoder.output_bias[1029] = 1
    expected = search(model, options=options, kind=TorchSearch)
    for ensemble in ([model], [model, model]):
        models.assert_same(expected, search(ensemble, options=options))
