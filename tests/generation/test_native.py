"""The native search against the one in torch, which defines it, and against itself: threads, batches, arithmetic."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.generation import DTYPES, BatchSearch, SearchOptions, native
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.native import NativeSearch
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules import ModelConfig, StackConfig, build_model
from lightconv_plugin.modules.attention import AttentionConv
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.instructions import compiled_for, instruction_set
from tests import programs
from tests.checkpoints.exports import build_model as build_exported
from tests.checkpoints.exports import pair
from tests.fastest import fastest
from tests.generation import random_models as models

pytestmark = pytest.mark.skipif(backends.decision("cpu").backend != "cpu", reason="no native kernels")

SEEDS, PER_TEST = 500, 10
_QUERIES = AttentionConv(("q",), 3, "lightweight")


def _seeds(first: int):
    marks = () if first < 80 else pytest.mark.long
    return pytest.param(range(first, first + PER_TEST), id=f"from-{first}", marks=marks)


@pytest.mark.parametrize("seeds", [_seeds(first) for first in range(0, SEEDS, PER_TEST)])
def test_random_models_and_options(seeds):
    found = []
    for seed in seeds:
        case = models.random_case(seed)
        expected = case.search(TorchSearch)
        found.append(case.search(models.native_search, threads=1))
        models.assert_same(expected, found[-1], f"seed {seed}:")
        threads = 2 + seed % 3
        models.assert_equal(
            found[-1], case.search(models.native_search, threads=threads), f"seed {seed}, {threads} threads:"
        )
    assert any(isinstance(hypotheses, list) for hypotheses in found)


# ------------------------------------------------------------------------------------------------ ensembles


@pytest.mark.parametrize("scale", [0.3, 1, 8])
def test_an_ensemble_with_more_hypotheses_than_are_averaged_at_a_time(scale):
    """Its models agree in most words (0.3) or in none; some sentences are forced to end between two parts."""
    rng = random.Random(1)
    ensemble = [models.random_model(rng, 40, 1500) for _ in range(3)]
    with torch.no_grad():
        for model in ensemble:
            table = model.decoder.output_projection or model.decoder.embed_tokens
            table.weight.mul_(scale)
    options = SearchOptions(pad=models.PAD, unk=models.UNK, eos=models.EOS, beam_size=4, unk_penalty=-1.0)
    prefix = torch.tensor([[7, 2], [8, 9], [1, 1], [5, 1], [3, 2]]).repeat(10, 1)
    case = models.Case(ensemble, options, models.random_batch(rng, 50, 5, 40), 4, {"prefix": prefix})
    expected = case.search(TorchSearch)
    found = case.search(models.native_search, threads=1)
    models.assert_same(expected, found)
    models.assert_equal(found, case.search(models.native_search, threads=3), "3 threads:")


def test_a_second_model_does_not_take_several_times_as_long():
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=5, dtype="int8", threads=1)
    source = torch.full((8, 1), 2)

    def searching(count: int) -> Callable[[], object]:
        search = models.native_search([_table_and_output(seed, words=8000) for seed in range(count)], options)
        return lambda: search.search(source, torch.ones(8), 8)

    one, two = fastest(5, searching(1), searching(2))
    assert two < 6 * one  # it was 16 times with the logarithm of each mean


# ------------------------------------------------------------------------------------------------ threads, batches


# A mixer and options of it.
VARIANTS = {
    "low-rank": ("dynamic", {"dynamic_rank": 16, "dynamic_residual": True}),
    "convolved": ("attention", {"attention_conv": AttentionConv(("q", "k", "v"))}),
    "convolved-dynamic": ("window_attention", {"attention_conv": AttentionConv(("q", "v"), 3, "dynamic")}),
}


def _wide(name: str):
    """A model with products that are large enough to be shared, and a batch for it."""
    rng = random.Random(7)
    kind, options = VARIANTS.get(name, (name, {}))
    config = pair(kind)
    encoder, decoder = (
        replace(side, mixers=tuple(replace(mixer, **options) for mixer in side.mixers))
        for side in (config.encoder, config.decoder)
    )
    decoder = replace(decoder, vocab_size=700, cross_attention_conv=_QUERIES if name == "convolved" else None)
    if kind in ("lightweight", "dynamic"):  # one has heads wider than a vector, one has narrow ones
        decoder = replace(decoder, mixers=(decoder.mixers[0], replace(decoder.mixers[1], num_heads=32)))
    model = build_exported(replace(config, encoder=encoder, decoder=decoder))
    with torch.no_grad():
        model.decoder.embed_tokens.weight.mul_(2)
    return model, models.random_batch(rng, 7, 8, config.encoder.vocab_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*MIXERS, *VARIANTS])
def test_the_same_bits_for_any_threads_and_batches(kind, dtype):
    model, source = _wide(kind)
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=3)

    def search(batch, threads, **more):
        lengths = batch.ne(1).sum(dim=1)
        chosen = replace(options, dtype=dtype, threads=threads)
        return models.native_search([model], chosen).search(batch, lengths, 6, **more)

    expected = search(source, 1)
    for threads in (2, 3, 5):
        models.assert_equal(expected, search(source, threads), f"{threads} threads:")
    order = [4, 0, 6, 2, 5, 1, 3]
    models.assert_equal([expected[i] for i in order], search(source[order], 2), "in another order:")
    for side in ((0, 5), (3, 0)):
        models.assert_equal(expected, search(F.pad(source, side, value=1), 3), f"padded by {side}:")
    for i in (0, 3):
        alone = source[i][source[i] != 1].unsqueeze(0)
        models.assert_equal(expected[i : i + 1], search(alone, 3), f"sentence {i} alone:")
    # Forced words take another way through the vocabulary.
    first = torch.stack([hypotheses[0]["tokens"][:1] for hypotheses in expected])
    forced = search(source, 1, prefix=first)
    for threads in (2, 5):
        models.assert_equal(forced, search(source, threads, prefix=first), f"{threads} threads, prefix:")
    found_again = 0
    for one, other in zip(expected, forced, strict=True):
        scores = {tuple(hypothesis["tokens"].tolist()): hypothesis["score"] for hypothesis in other}
        best = tuple(one[0]["tokens"].tolist())
        if best in scores:
            found_again += 1
            assert torch.equal(scores[best], one[0]["score"])
    assert found_again > len(expected) / 2


def test_threads_by_default_are_those_of_torch():
    case = models.random_case(3)
    models.assert_equal(case.search(models.native_search, threads=1), case.search(models.native_search))


def test_searches_at_the_same_time():
    """Two threads of Python share one search, which keeps nothing of a call."""
    from concurrent.futures import ThreadPoolExecutor

    model, source = _wide("attention")
    search = models.native_search([model], SearchOptions(pad=1, unk=3, eos=2, beam_size=3, threads=2))
    lengths = source.ne(1).sum(dim=1)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: search.search(source, lengths, 6), range(6)))
    for other in found[1:]:
        models.assert_equal(found[0], other)


# ------------------------------------------------------------------------------------------------ arithmetic

DIM, WORDS = 37, 75


def _table_and_output(seed: int, words: int = WORDS):
    """A model without layers: embeddings and the output's product are all it has."""
    sides = [
        StackConfig(words, DIM, 1, 1, (), positions="none", output_bias=causal, embed_scale=2.0)
        for causal in (True, False)
    ]
    torch.manual_seed(seed)
    model = build_model(ModelConfig(sides[0], sides[1])).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(3)
        model.decoder.output_projection.weight[7] = 0
        model.decoder.output_projection.bias.normal_()
    return model


def _log_probabilities(model, dtype: str, begin: int) -> torch.Tensor:
    """Of all words that may follow, by forcing each in turn."""
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=1, dtype=dtype)
    words = torch.tensor([word for word in range(WORDS) if word != 1])
    prefix = torch.stack([words, torch.full_like(words, 2)], dim=1)
    source = torch.full((len(words), 1), 2)
    found = models.native_search([model], options).search(source, torch.ones(len(words)), 4, prefix=prefix, begin=begin)
    return torch.stack([hypotheses[0]["positional_scores"][0] for hypotheses in found])


def _quantised(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Each row on a grid of its own that has 0: `levels` steps from the least entry to the largest."""
    least, most = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (most - least) / levels
    zero = (-least / scale).round()
    return ((x / scale + zero).round().clamp(0, levels) - zero) * scale


def _emulated(model, dtype: str, begin: int, instructions: bool) -> torch.Tensor:
    output = model.decoder.output_projection
    x, weight = 2 * model.decoder.embed_tokens.weight[begin].double().unsqueeze(0), output.weight.double()
    if dtype == "bfloat16":
        weight = weight.bfloat16().double()
        x = x.bfloat16().double() if instructions else x
    if dtype == "int8":
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        weight = (weight / scale).round() * scale
        # Without an instruction for sums of four, pairs of products must fit into 16 bits.
        x = _quantised(x, 127 if compiled_for() and not instructions else 255)
    logits = x @ weight.t() + output.bias.double()
    found = logits.log_softmax(1)[0]
    return torch.cat([found[:1], found[2:]]).float()


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_what_its_type_says(dtype, instructions, monkeypatch):
    if instructions and dtype != "float32" and not native._has_instructions(dtype):
        pytest.skip(f"{instruction_set()}: no instructions for {dtype}")
    monkeypatch.setattr(native, "_has_instructions", lambda dtype: instructions)
    model = _table_and_output(5)
    with torch.no_grad():
        for begin in (2, 40, 74):
            found = _log_probabilities(model, dtype, begin)
            torch.testing.assert_close(found, _emulated(model, dtype, begin, instructions), rtol=0, atol=2e-5)
            exact = _emulated(model, "float32", begin, instructions)
            # So the emulation is of something, and a loss of the size that 8 bits and 8 bits of mantissa have.
            assert dtype == "float32" or 1e-4 < float((found - exact).abs().max()) < 0.15


@pytest.mark.parametrize("kind", [*MIXERS, *VARIANTS])
def test_reduced_types_are_close_to_float32(kind):
    """Log-probabilities of the same words, of a whole model."""
    model, source = _wide(kind)
    lengths = source.ne(1).sum(dim=1)
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=1)
    exact = models.native_search([model], options).search(source, lengths, 6)
    longest = max(len(hypotheses[0]["tokens"]) for hypotheses in exact)
    prefix = torch.full((len(source), longest), 1)
    for row, hypotheses in zip(prefix, exact, strict=True):
        row[: len(hypotheses[0]["tokens"])] = hypotheses[0]["tokens"]
    for dtype, most in (("float32", 1e-6), ("bfloat16", 0.05), ("int8", 0.1)):
        found = models.native_search([model], replace(options, dtype=dtype)).search(source, lengths, 7, prefix=prefix)
        gaps = [
            (other[0]["positional_scores"] - one[0]["positional_scores"]).abs()
            for one, other in zip(exact, found, strict=True)
        ]
        assert torch.cat(gaps).mean() <= most, dtype


# ------------------------------------------------------------------------------------------------ instruction levels

_AT_A_LEVEL = """
import sys
import torch
from lightconv_plugin.ops import backends
from tests.generation import random_models as models
assert backends.decision("cpu").backend == "cpu"
torch.save({seed: models.random_case(seed).search(models.native_search) for seed in range(20)}, sys.argv[1])
"""


def _at_level(level: str, file) -> dict:
    programs.run(sys.executable, "-c", _AT_A_LEVEL, file, LIGHTCONV_CPU_ISA=level)
    return torch.load(file)


@pytest.mark.long  # it compiles a library for AVX2
def test_results_at_other_instruction_levels(tmp_path):
    """Vectors of another width only add in another order; more instructions change nothing in float32."""
    if instruction_set() is None:
        pytest.skip("no levels on this CPU")
    here = {seed: models.random_case(seed).search(models.native_search) for seed in range(20)}
    levels = {level: _at_level(level, tmp_path / level) for level in ("avx2", "avx512", "avx512_vnni")}
    for seed, expected in here.items():
        models.assert_same(expected, levels["avx2"][seed], f"avx2, seed {seed}:")
        for level in ("avx512", "avx512_vnni"):
            models.assert_equal(expected, levels[level][seed], f"{level}, seed {seed}:")


def test_batch_search_is_native_where_it_can_be():
    case = models.random_case(1)
    assert isinstance(BatchSearch(case.models, case.options)._search, NativeSearch)
    for dtype in (torch.float64, torch.bfloat16):
        other = [model.to(dtype) for model in case.models]
        assert isinstance(BatchSearch(other, case.options)._search, TorchSearch)
