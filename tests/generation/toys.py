"""Small random translation models whose hypotheses differ, and the comparison with fairseq's generator."""

from argparse import Namespace

import torch
from fairseq.models.transformer import TransformerConfig, TransformerModel, TransformerModelBase, transformer_legacy
from fairseq.sequence_generator import SequenceGenerator

from lightconv_plugin.generation import FastGenerator
from tests.models.toys import build, dictionary, task

VOCABULARY = 90
SIDE = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 4}


def sharpen(model, share: float = 0.15):
    """The model with larger output weights, and with a bias by which in that share of its steps the end of the sentence
    is likelier than any word: random weights as such make flat distributions, in which all hypotheses are as good, and
    which hardly ever end."""
    with torch.no_grad():
        decoder = model.decoder
        weight = decoder.output_projection.weight
        decoder.output_projection = torch.nn.Linear(weight.shape[1], weight.shape[0])
        decoder.output_projection.weight.copy_(weight * (2.5 / weight.std() / weight.shape[1] ** 0.5))
        decoder.output_projection.bias.zero_()
        for name, parameter in model.named_parameters():
            # So that a bias, a norm or learned positions that are left out show.
            if (parameter.dim() == 1 and "output_projection" not in name) or "embed_positions" in name:
                parameter += 0.3 * torch.randn_like(parameter)
        model.eval()
        sample = batch(8, vocabulary=weight.shape[0])
        found = SequenceGenerator([model], dictionary(weight.shape[0]), beam_size=2, min_len=16, max_len_b=16).generate(
            [model], sample
        )
        words = torch.stack([hypotheses[0]["tokens"] for hypotheses in found]).roll(1, dims=1)
        logits = model(**sample["net_input"], prev_output_tokens=words)[0]
        gaps = logits[:, :, 3:].amax(dim=2) - logits[:, :, 2]
        decoder.output_projection.bias[2] = gaps.flatten().quantile(share)
    return model


def ours(mixer="dynamic", vocabulary: int = VOCABULARY, **options):
    words = task(dictionary(vocabulary))
    return sharpen(build(task_=words, decoder_conv_type=mixer, **options))


def fairseqs(vocabulary: int = VOCABULARY, **options):
    """fairseq's TransformerModel, from options as of its command line."""
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
    arguments = Namespace(**{**sizes, "max_source_positions": 64, "max_target_positions": 64, **options})
    transformer_legacy.base_architecture(arguments)
    return sharpen(TransformerModel.build_model(arguments, task(dictionary(vocabulary))))


def fairseqs_base(vocabulary: int = VOCABULARY, **options):
    """fairseq's TransformerModelBase, from its configuration object."""
    config = TransformerConfig()
    for side in (config.encoder, config.decoder):
        for name, value in SIDE.items():
            setattr(side, name, value)
    config.decoder.input_dim = config.decoder.output_dim = SIDE["embed_dim"]
    config.max_source_positions = config.max_target_positions = 64
    for name, value in options.items():
        setattr(config, name, value)
    return sharpen(TransformerModelBase.build_model(config, task(dictionary(vocabulary))))


def batch(sentences: int = 5, longest: int = 9, vocabulary: int = VOCABULARY, *, left_pad: bool = True) -> dict:
    """A batch as fairseq's collater makes it, of sentences of random lengths, pads where they are shorter."""
    lengths = torch.randint(2, longest + 1, (sentences,))
    tokens = torch.full((sentences, int(lengths.max())), 1)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        words = torch.randint(4, vocabulary, (length,))
        words[-1] = 2
        row[len(row) - length if left_pad else 0 :][:length] = words
    return {"id": torch.arange(sentences), "net_input": {"src_tokens": tokens, "src_lengths": lengths}}


def generate_both(models, sample, *, generate=None, vocabulary: int = VOCABULARY, **options):
    """(fairseq's, ours): the lists of hypotheses for the same models, options and batch."""
    words = dictionary(vocabulary)
    options = {"beam_size": 5, "max_len_b": 30, **options}
    theirs = SequenceGenerator(models, words, **options)
    fast = FastGenerator(models, words, **options)
    result = theirs.generate(models, sample, **(generate or {})), fast.generate(models, sample, **(generate or {}))
    assert fast._said == {"the plugin's own search translates"}
    return result


def assert_same(theirs, found, tolerance: float = 1e-4) -> None:
    """Equal words and scores; where scores tie within rounding, hypotheses may be in another order."""
    assert len(theirs) == len(found)
    for sentence, (expected, got) in enumerate(zip(theirs, found, strict=True)):
        assert len(expected) == len(got), f"sentence {sentence}: {len(expected)} hypotheses, got {len(got)}"
        remaining = list(got)
        for place, hypothesis in enumerate(expected):
            assert_close(hypothesis["score"], got[place]["score"], tolerance, f"{sentence}, {place}: score")
            same = [other for other in remaining if torch.equal(hypothesis["tokens"], other["tokens"])]
            assert same, f"sentence {sentence}: {hypothesis['tokens'].tolist()} was not found"
            other = min(same, key=lambda other: float((other["score"] - hypothesis["score"]).abs().nan_to_num(0)))
            remaining = [one for one in remaining if one is not other]
            assert_close(hypothesis["score"], other["score"], tolerance, f"{sentence}, {place}: score of these words")
            assert_close(hypothesis["positional_scores"], other["positional_scores"], tolerance, f"{sentence}, {place}")
            assert {name: value.dtype for name, value in hypothesis.items() if name != "attention"} == {
                name: value.dtype for name, value in other.items() if name != "attention"
            }


def assert_close(expected, got, tolerance: float, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=tolerance, msg=lambda text: f"{what}: {text}")


def lengths(hypotheses) -> set[int]:
    return {len(one["tokens"]) for sentence in hypotheses for one in sentence}
