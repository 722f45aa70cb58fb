"""Random plain models, batches and options for the searches, and the comparison of what two searches find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from lightconv_plugin.generation import SearchOptions
from lightconv_plugin.generation.finished import NoHypothesisError
from lightconv_plugin.generation.native import NativeSearch, describe
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules import MixerSpec, ModelConfig, StackConfig, build_model
from lightconv_plugin.modules.attention import CONV_KINDS, AttentionConv
from lightconv_plugin.modules.config import Activation
from lightconv_plugin.ops import NORMALIZATIONS

PAD, EOS, UNK = 1, 2, 3


@dataclass
class Case:
    """What a search is given: its arguments, and those of its `search`."""

    models: list[Any]
    options: SearchOptions
    source: Tensor
    max_len: int
    extra: dict[str, Any] = field(default_factory=dict)

    def search(self, kind: Callable, **options):
        """The hypotheses that a search of this kind finds with these options changed; the text of its error if there is
        no possible one."""
        lengths = self.source.ne(PAD).sum(dim=1)
        try:
            with torch.no_grad():
                search = kind(self.models, replace(self.options, **options))
                return search.search(self.source, lengths, self.max_len, **self.extra)
        except NoHypothesisError as error:
            return str(error)


def native_search(models, options: SearchOptions) -> NativeSearch:
    described = describe(models)
    if isinstance(described, ValueError):
        raise described
    return NativeSearch(described, options)


def random_case(seed: int) -> Case:
    """Models of one or two layers of anything, now and then an ensemble, with all options of the search."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    source_words = rng.randint(6, 90)
    # Some have more words than are summed up at a time, a few more than are computed at a time.
    words = rng.choices([rng.randint(8, 130), rng.randint(1000, 2100), rng.randint(9000, 11000)], [90, 8, 2])[0]
    models = [random_model(rng, source_words, words) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    beam, max_len = rng.randint(1, 7), rng.randint(1, 12)
    options = SearchOptions(
        pad=PAD,
        unk=UNK,
        eos=EOS,
        beam_size=beam,
        min_len=rng.randint(0, min(max_len, 3)),
        normalize_scores=rng.random() < 0.8,
        len_penalty=rng.choice((-0.5, 0.0, 0.6, 1.0, 1.0, 1.7)),
        unk_penalty=rng.choice((0.0, 0.0, 2.0, -1.0)),
        temperature=rng.choice((1.0, 1.0, 0.6, 1.8)),
        match_source_len=rng.random() < 0.1,
        no_repeat_ngram_size=rng.choice((0, 0, 0, 1, 2, 3)),
        suppress=tuple(rng.sample(range(4, words), rng.choice((0, 0, 1, 3)))),
    )
    source = random_batch(rng, rng.randint(1, 6), 9, source_words)
    extra: dict[str, Any] = {}
    if rng.random() < 0.3:
        extra["prefix"] = random_prefix(rng, len(source), words)
    if rng.random() < 0.2:
        extra["begin"] = rng.randrange(4, words)
    return Case(models, options, source, max_len, extra)


def random_model(rng: random.Random, source_words: int, words: int, mixers: tuple[str, ...] | None = None):
    """An encoder-decoder whose parameters are all random, and whose hypotheses differ clearly and sometimes end.

    mixers: those of the decoder, a layer each; by default one or two of any.
    """
    dim = rng.choice((4, 12, 16, 20, 32, 36, 64))
    encoder = _stack(rng, rng.choice((dim, dim, 12, 40)), source_words, causal=False)
    word_dim = rng.choice((dim, dim, 10, 24))
    tied = rng.random() < 0.5
    encoder_dim = rng.choice((encoder.embed_dim, encoder.embed_dim, encoder.embed_dim, None))
    convolved = None
    if encoder_dim is not None and rng.random() < 0.3:
        convolved = replace(random_convolution(rng), projections=("q",))
    decoder = _stack(
        rng,
        dim,
        words,
        mixers,
        causal=True,
        input_dim=word_dim,
        output_dim=word_dim if tied else rng.choice((dim, 18)),
        share_input_output=tied,
        output_bias=rng.random() < 0.5,
        encoder_dim=encoder_dim,
        cross_attention_conv=convolved,
    )
    share = word_dim == dim == encoder.embed_dim and source_words == words and rng.random() < 0.5
    model = build_model(ModelConfig(decoder, encoder, share_embeddings=share, pad=PAD, eos=EOS, unk=UNK))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        table = model.decoder.embed_tokens.weight if tied else model.decoder.output_projection.weight
        table.mul_(2)
        table[EOS].mul_(1.5)
    return model.eval()


def model_of(mixer: str, words: int = 60):
    """A `random_model` with two decoder layers of this mixer, for 50 source words."""
    torch.manual_seed(5)
    return random_model(random.Random(5), 50, words, (mixer, mixer))


def _stack(rng: random.Random, dim: int, words: int, mixers=None, *, causal: bool, **options) -> StackConfig:
    return StackConfig(
        vocab_size=words,
        embed_dim=dim,
        ffn_dim=rng.choice((1, 7, 24, 33, 64)),
        num_heads=_divisor(rng, dim),
        mixers=tuple(random_mixer(rng, dim, causal=causal, kind=kind) for kind in mixers or [None] * rng.randint(1, 2)),
        normalize_before=rng.random() < 0.5,
        final_norm=rng.random() < 0.5,
        positions=rng.choice(("sinusoidal", "learned", "none")),
        max_positions=32,
        embedding_norm=rng.random() < 0.3,
        embed_scale=rng.choice((1.0, dim**0.5)),
        activation=rng.choice(get_args(Activation)),
        **options,
    )


def random_mixer(rng: random.Random, dim: int, *, causal: bool, kind: str | None = None) -> MixerSpec:
    kind = kind or rng.choice([*MIXERS])
    channels = dim if kind == "conv" else rng.choice((dim, 2 * dim, 15, 40, 72))
    return MixerSpec(
        kind,
        kernel_size=rng.choice((1, 2, 3, 4, 7)),
        conv_dim=channels,
        num_heads=_divisor(rng, channels if MIXERS[kind].headed else dim),
        glu=rng.random() < 0.5,
        input_dropout=0.0,
        weight_dropout=0.0,
        normalize=rng.choice(tuple(NORMALIZATIONS)),
        attention_dropout=0.0,
        causal=causal,
        dynamic_rank=rng.choice((0, 0, 1, 5)) if kind == "dynamic" else 0,
        dynamic_residual=kind == "dynamic" and rng.random() < 0.3,
        attention_conv=random_convolution(rng) if "attention" in kind and rng.random() < 0.5 else None,
    )


def random_convolution(rng: random.Random) -> AttentionConv:
    projections = rng.choice((("q", "k", "v"), ("q", "v"), ("k",)))
    return AttentionConv(projections, rng.choice((2, 4, 5)), rng.choice(CONV_KINDS))


def _divisor(rng: random.Random, n: int) -> int:
    return rng.choice([i for i in range(1, n + 1) if n % i == 0])


def random_batch(rng: random.Random, sentences: int, longest: int, words: int) -> Tensor:
    """Sentences that end, with pads on one side of each."""
    rows = []
    for _ in range(sentences):
        row = [rng.randrange(4, words) for _ in range(rng.randint(0, longest - 1))] + [EOS]
        pads = [PAD] * (longest - len(row))
        rows.append(rng.choice((pads + row, row + pads)))
    return torch.tensor(rows)


def random_prefix(rng: random.Random, sentences: int, words: int) -> Tensor:
    """Prefixes of different lengths, some of which are whole sentences."""
    longest = rng.randint(1, 4)
    rows = []
    for _ in range(sentences):
        row = [rng.randrange(4, words) for _ in range(rng.randint(0, longest))]
        if row and rng.random() < 0.2:
            row[-1] = EOS
        rows.append(row + [PAD] * (longest - len(row)))
    return torch.tensor(rows)


def vocabulary(case: Case) -> int:
    return case.models[0].config.decoder.vocab_size


def some_words(case: Case, seed: int) -> Tensor:
    """A shortlist: the symbols, forced words, more words than a step chooses, and others."""
    rng = random.Random(seed)
    words = range(4, vocabulary(case))
    least = min(len(words), 2 * case.options.beam_size + 4)
    chosen = {*range(4), *rng.sample(words, rng.randint(least, len(words)))}
    if (prefix := case.extra.get("prefix")) is not None:
        chosen.update(prefix.flatten().tolist())
    return torch.tensor(sorted(chosen))


def with_words(case: Case, words: Tensor) -> Case:
    """The case with a shortlist."""
    return replace(case, extra={**case.extra, "words": words})


def assert_same(expected, found, what: str = "", tolerance: float = 1e-4) -> None:
    """Equal errors, or equal words, scores, types; where scores tie within rounding, hypotheses may change places."""
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, what
        return
    assert [len(hypotheses) for hypotheses in found] == [len(hypotheses) for hypotheses in expected], what
    for sentence, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        remaining = list(ours)
        for place, hypothesis in enumerate(theirs):
            where = f"{what} sentence {sentence}, hypothesis {place}"
            _assert_close(hypothesis["score"], ours[place]["score"], tolerance, where)
            same = [other for other in remaining if torch.equal(hypothesis["tokens"], other["tokens"])]
            assert same, f"{where}: {hypothesis['tokens'].tolist()} is not among " + ", ".join(
                str(other["tokens"].tolist()) for other in ours
            )
            # A forced end gives the same words several times.
            other = min(same, key=lambda other: float((other["score"] - hypothesis["score"]).abs().nan_to_num(0)))
            remaining = [one for one in remaining if one is not other]
            for name in ("score", "positional_scores"):
                _assert_close(hypothesis[name], other[name], tolerance, f"{where}, {name}")
            assert _types(hypothesis) == _types(other), where


def _types(hypothesis) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in hypothesis.items() if name != "attention"}


def _assert_close(expected: Tensor, found: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_equal(expected, found, what: str = "") -> None:
    """Equal errors, or hypotheses that are equal to the last bit."""
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, what
        return
    assert len(found) == len(expected), what
    for sentence, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            for name in ("tokens", "score", "positional_scores"):
                same = torch.equal(one[name], other[name])
                assert same, f"{what} sentence {sentence}, hypothesis {place}: {name} {one[name]}, {other[name]}"
