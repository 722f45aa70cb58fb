"""The compared models, by name: ours, fairseq's own LightConv and DynamicConv, and its Transformer.

fairseq's classes are taken from its modules, not from its registry, where our plugin may have registered its own. Each
model is checked: it must have exactly the convolutions that its name says, one per layer, and no others.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.candidates import import_fairseq
from benchmarks.machine import ROOT
from benchmarks.report import BenchmarkError

if import_fairseq() is None:
    raise BenchmarkError("fairseq is not installed: pip install '.[fairseq]', or scripts/setup.sh")

from fairseq.data import Dictionary
from fairseq.models import lightconv as fairseq_lightconv
from fairseq.models.lightconv import LightConvModel
from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from lightconv_plugin.models import architectures

DYNAMIC, LIGHT, TALK = "DynamicConv (ours)", "LightConv (ours)", "TaLK (ours)"
FAIRSEQ_DYNAMIC, FAIRSEQ_LIGHT, TRANSFORMER = "fairseq DynamicConv", "fairseq LightConv", "fairseq Transformer"
SYSTEMS = (DYNAMIC, LIGHT, TALK, FAIRSEQ_DYNAMIC, FAIRSEQ_LIGHT, TRANSFORMER)
# Their training steps never wait for the device.
WITH_GRAPHS = (DYNAMIC, LIGHT, TALK, TRANSFORMER)


@dataclass(frozen=True)
class Preset:
    """Sizes of the models and of a batch.

    architecture: the suffix of our architectures, fairseq's lightconv and its Transformer; or a folder in configs/
    whose files define the sizes. vocabulary: of the joint dictionary. sentences × length: a batch of random tokens.
    """

    architecture: tuple[str, str, str] | str
    vocabulary: int
    sentences: int
    length: int
    shared_embeddings: bool = False


PRESETS = {
    "iwslt_de_en": Preset(("_iwslt_de_en", "lightconv_iwslt_de_en", "transformer_iwslt_de_en"), 10_000, 40, 25),
    "multi30k_en_de": Preset("multi30k_en_de", 9_712, 256, 16, shared_embeddings=True),
    # 3584 tokens per GPU and step, as in the paper (section 5.1).
    "wmt_en_de_big": Preset(
        ("_wmt_en_de_big", "lightconv_wmt_en_de_big", "transformer_vaswani_wmt_en_de_big"), 32_768, 128, 28, True
    ),
}
_TINY_SIDE = {"embed_dim": 32, "ffn_embed_dim": 48, "layers": 2, "attention_heads": 4}
_TINY = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _TINY_SIDE.items()}
_TINY_ENDS = {"decoder_input_dim": 32, "decoder_output_dim": 32}
_TINY_KERNELS = {"encoder_kernel_size_list": [3, 7], "decoder_kernel_size_list": [3, 7]}
_CONFIGS = {DYNAMIC: "dynamicconv", TALK: "talkconv", FAIRSEQ_DYNAMIC: "dynamicconv", TRANSFORMER: "transformer"}
_FAMILIES = {DYNAMIC: "dynamicconv", LIGHT: "lightweightconv", TALK: "talkconv"}


def sized(preset: Preset, quick: bool, sentences: int | None, length: int | None) -> Preset:
    """The preset, with another batch if given; `quick` makes batch and vocabulary tiny."""
    if quick:
        preset = replace(preset, vocabulary=100, sentences=4, length=6)
    return replace(preset, sentences=sentences or preset.sentences, length=length or preset.length)


def dictionary(size: int) -> Dictionary:
    """A dictionary with `size` entries, including fairseq's four special ones."""
    result = Dictionary()
    for number in range(size - len(result)):
        result.add_symbol(f"w{number}")
    return result


def task(words: Dictionary) -> TranslationTask:
    """A translation task without data."""
    return TranslationTask(TranslationConfig(), words, words)


def random_batches(preset: Preset, words: Dictionary, count: int) -> list[dict]:
    """Batches as made by fairseq's collater, of sentences of equal length (including the end of the sentence)."""
    generator = torch.Generator().manual_seed(20190429)

    def tokens() -> Tensor:
        shape = (preset.sentences, preset.length)
        result = torch.randint(words.nspecial, len(words), shape, generator=generator)
        result[:, -1] = words.eos()
        return result

    batches = []
    for _ in range(count):
        source, target = tokens(), tokens()
        net_input = {
            "src_tokens": source,
            "src_lengths": torch.full((preset.sentences,), preset.length),
            "prev_output_tokens": target.roll(1, dims=1),
        }
        batches.append(
            {
                "id": torch.arange(preset.sentences),
                "nsentences": preset.sentences,
                "ntokens": target.numel(),
                "net_input": net_input,
                "target": target,
            }
        )
    return batches


def build(system: str, preset: Preset, task, *, tiny: bool = False) -> nn.Module:
    """The named model, with random initialisation, on the CPU and in training mode."""
    torch.manual_seed(1)
    options = _options(system, preset)
    if tiny:
        options |= _TINY | (_TINY_ENDS if system == TRANSFORMER else _TINY_KERNELS)
    build_model = _build_ours if system in _FAMILIES else _build_fairseqs
    model = build_model(system, preset, options, task)
    _check(system, model)
    return model


def _options(system: str, preset: Preset) -> dict:
    """The model's options besides those of its architecture."""
    # Defaults that fairseq's command line would fill in.
    options = {"max_source_positions": 1024, "max_target_positions": 1024}
    if system not in (TALK, TRANSFORMER):
        options["weight_softmax"] = True
    if isinstance(preset.architecture, str):
        file = _CONFIGS.get(system, "lightweightconv")
        config = OmegaConf.load(ROOT / "configs" / preset.architecture / f"{file}.yaml")
        options |= OmegaConf.to_container(config.model)
        del options["_name"]
    if preset.shared_embeddings:
        options |= {"share_all_embeddings": True}
    return options


def _build_ours(system: str, preset: Preset, options: dict, task) -> nn.Module:
    suffix = "" if isinstance(preset.architecture, str) else preset.architecture[0]
    name = "".join(part.capitalize() for part in (_FAMILIES[system] + suffix).split("_"))
    config = getattr(architectures, name + "Config")()
    for option, value in options.items():
        setattr(config, option, value)
    return getattr(architectures, name + "Model").build_model(config, task)


def _build_fairseqs(system: str, preset: Preset, options: dict, task) -> nn.Module:
    arguments = Namespace(**options)
    table = isinstance(preset.architecture, str)
    if system == TRANSFORMER:
        name = "base_architecture" if table else preset.architecture[2]
        getattr(transformer_legacy, name)(arguments)
        return TransformerModel.build_model(arguments, task)
    kind = "dynamic" if system == FAIRSEQ_DYNAMIC else "lightweight"
    arguments.encoder_conv_type = arguments.decoder_conv_type = kind
    getattr(fairseq_lightconv, "base_architecture" if table else preset.architecture[1])(arguments)
    return LightConvModel.build_model(arguments, task)


_MODULES = {
    DYNAMIC: ("lightconv_plugin.modules.convolutions", "DynamicConv"),
    LIGHT: ("lightconv_plugin.modules.convolutions", "LightweightConv"),
    TALK: ("lightconv_plugin.modules.talk", "TaLKConv"),
    FAIRSEQ_DYNAMIC: ("fairseq.modules.dynamic_convolution", "DynamicConv"),
    FAIRSEQ_LIGHT: ("fairseq.modules.lightweight_convolution", "LightweightConv"),
}


def _check(system: str, model: nn.Module) -> None:
    """Check that the model has exactly the token mixers that its name says."""
    layers = [*model.encoder.layers, *model.decoder.layers]
    found = [(type(m).__module__, type(m).__name__) for m in model.modules()]
    found = [pair for pair in found if any(pair[0] == module for module, _ in _MODULES.values())]
    expected = _MODULES.get(system)
    right = [pair for pair in found if expected and pair[0] == expected[0] and pair[1].startswith(expected[1])]
    if len(right) != len(found) or len(found) != (len(layers) if expected else 0):
        raise BenchmarkError(
            f"{system} was built with other token mixers: {sorted(set(found))} in {len(layers)} layers"
        )


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
