"""Small random translation models whose hypotheses differ, and the comparison with fairseq's generator."""

from argparse import Namespace

import torch
from fairseq.models.transformer import TransformerConfig, TransformerModel, TransformerModelBase, transformer_legacy
from fairseq.sequence_generator import SequenceGenerator

from lightconv_plugin.generation import FastGenerator
from tests.generation.random_models import assert_same
from tests.generation.recordings import searching
from tests.models.toys import build, dictionary, task

VOCABULARY = 90
SIDE = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 4}


@torch.no_grad()
def stirred(model):
    """So that a bias, a norm or learned positions that are left out show."""
    for name, parameter in model.named_parameters():
        if (parameter.dim() == 1 and "output_projection" not in name) or "embed_positions" in name:
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


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
        stirred(model)
        sample = batch(8, vocabulary=weight.shape[0])
        found = SequenceGenerator([model], dictionary(weight.shape[0]), beam_size=2, min_len=16, max_len_b=16).generate(
            [model], sample
        )
        words = torch.stack([hypotheses[0]["tokens"] for hypotheses in found]).roll(1, dims=1)
        logits = model(**sample["net_input"], prev_output_tokens=words)[0]
        gaps = logits[:, :, 3:].amax(dim=2) - logits[:, :, 2]
        decoder.output_projection.bias[2] = gaps.flatten().quantile(share)
    return model


def ours(mixer="dynamic", vocabulary: int = VOCABULARY, prepare=sharpen, **options):
    words = task(dictionary(vocabulary))
    return prepare(build(task_=words, decoder_conv_type=mixer, **options))


def fairseqs(vocabulary: int = VOCABULARY, prepare=sharpen, **options):
    """fairseq's TransformerModel, from options as of its command line."""
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
    arguments = Namespace(**{**sizes, "max_source_positions": 64, "max_target_positions": 64, **options})
    transformer_legacy.base_architecture(arguments)
    return prepare(TransformerModel.build_model(arguments, task(dictionary(vocabulary))))


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


def check(
    models, sample, *, searches=("native",), generate=None, vocabulary: int = VOCABULARY, tolerance=1e-4, **options
):
    """These searches find fairseq's hypotheses, with the same models, options and batch; the list of them."""
    words = dictionary(vocabulary)
    options = {"beam_size": 5, "max_len_b": 30, **options}
    theirs = SequenceGenerator(models, words, **options).generate(models, sample, **(generate or {}))
    for search in searches:
        with searching(search):
            fast = FastGenerator(models, words, **options)
            found = fast.generate(models, sample, **(generate or {}))
        assert fast._said == {"the plugin's own search translates"}
        assert_same(theirs, found, f"{search},", tolerance)
    return theirs


def lengths(hypotheses) -> set[int]:
    return {len(one["tokens"]) for sentence in hypotheses for one in sentence}
