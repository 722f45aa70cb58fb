"""Small dictionaries, tasks and models for the tests of models/."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary
from omegaconf import OmegaConf

import lightconv_plugin.models  # noqa: F401 (registers the architectures)

SMALL = {
    "encoder_embed_dim": 16,
    "decoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "decoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_kernel_size_list": [3, 5, 9],
    "decoder_kernel_size_list": [3, 5, 9],
}

# Mixers with options of theirs, by names that `build` takes for a mixer's: the mixer, and the options of a side.
VARIANTS = {
    "low-rank": ("dynamic", {"{side}_dynamic_rank": [3]}),
    "residual": ("dynamic", {"dynamic_residual": True}),
    "attention-qkv": ("attention", {"{side}_attention_conv": "q,k,v"}),
    "attention-dynamic-kv": (
        "window_attention",
        {"{side}_attention_conv": "k,v", "attention_conv_type": "dynamic", "attention_conv_kernel_size": 3},
    ),
    "cross-attention-q": ("lightweight", {"decoder_cross_attention_conv": "q", "attention_conv_type": "lightweight"}),
}

_USERS = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
    ("embed_dim", 16), ("ffn_embed_dim", 24), ("attention_heads", 4), ("layers", 2), ("kernel_size_list", [3, 5]),
    ("glu", False))}  # fmt: skip


def tiny(args):
    """A user's architecture, as fairseq's documentation writes one: it sets what the command line left unset."""
    for name, value in _USERS.items():
        setattr(args, name, getattr(args, name, value))


def options_of(model: type, *arguments: str) -> Namespace:
    """What a model's own parser reads."""
    parser = ArgumentParser(argument_default=SUPPRESS)
    model.add_args(parser)
    return parser.parse_args(arguments)


def dictionary(size: int = 30) -> Dictionary:
    d = Dictionary()
    for i in range(size - len(d)):
        d.add_symbol(f"w{i}")
    return d


def task(source: Dictionary | None = None, target: Dictionary | None = None, left_pad_target: bool = False):
    source = source or dictionary()
    return SimpleNamespace(
        source_dictionary=source,
        target_dictionary=target or source,
        cfg=SimpleNamespace(left_pad_target=left_pad_target),
    )


def build(architecture: str = "dynamicconv", task_=None, *, small: bool = True, **options):
    """The named architecture at toy size, in evaluation mode."""
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    for name, value in with_variants({**(SMALL if small else {}), **options}).items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    config._name = architecture
    model = models.build_model(OmegaConf.structured(config), task_ or task()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                "_conv." in name and parameter.device.type != "meta"
            ):  # those in attention begin as if they were not there
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def write_old_file(path, args: Namespace, state: dict) -> None:
    """A checkpoint as fairseq wrote it in 2019."""
    history = [{"num_updates": 7, "criterion_name": "LabelSmoothedCrossEntropyCriterion", "lr_scheduler_state": {}}]
    rest = {"optimizer_history": history, "extra_state": {"epoch": 1}, "last_optimizer_state": None}
    torch.save({"args": args, "model": state, **rest}, path)


def with_variants(options: dict) -> dict:
    """The options in which the names of VARIANTS are replaced by what they stand for."""
    found = dict(options)
    for side in ("encoder", "decoder"):
        if (kind := options.get(f"{side}_conv_type")) in VARIANTS:
            found[f"{side}_conv_type"], more = VARIANTS[kind]
            found |= {name.format(side=side): value for name, value in more.items()}
    return found


def batch(lengths=(7, 4, 9), target_lengths=(6, 8, 3), *, left_pad_source: bool = True, vocabulary: int = 30):
    """(src_tokens, src_lengths, prev_output_tokens), padded as fairseq's collater does."""
    pad = 1

    def padded(sizes, left):
        out = torch.full((len(sizes), max(sizes)), pad)
        for row, n in enumerate(sizes):
            tokens = torch.randint(4, vocabulary, (n,))
            tokens[-1] = 2
            out[row, -n:] = tokens if left else out[row, -n:]
            if not left:
                out[row, :n] = tokens
        return out

    source = padded(lengths, left_pad_source)
    return source, torch.tensor(lengths), padded(target_lengths, False)
