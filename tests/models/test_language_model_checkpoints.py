"""Other people's language models: fairseq's `lightconv_lm` in both layouts, TaLK's; strictly, with equal numbers."""

from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import lightconv_lm as upstream

from .language_model_toys import EMBEDDINGS, SMALL, build_lm, lm_task, log_probabilities, scramble, tokens
from .test_checkpoints import shapes
from .toys import dictionary, write_old_file

MIXERS = {
    "dynamic": {"decoder_conv_type": "dynamic"},
    "lightweight": {"decoder_conv_type": "lightweight"},
    "plain": {"decoder_conv_type": "dynamic", "decoder_glu": False},
    "nosoftmax": {"decoder_conv_type": "lightweight", "weight_softmax": False},
    "convdim": {"decoder_conv_type": "dynamic", "decoder_conv_dim": 32},
}
PARITY = [pytest.param({**MIXERS["dynamic"], **o}, id=f"dynamic-{name}") for name, o in EMBEDDINGS.items()]
PARITY += [pytest.param(o, id=name) for name, o in MIXERS.items() if name != "dynamic"]


def arguments(**options) -> Namespace:
    """As fairseq's command line leaves them, where every option without a default is absent."""
    given = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0, "weight_softmax": True}
    given |= {"decoder_conv_type": "dynamic", "tokens_per_sample": 64, "character_embedding_dim": 4}
    given |= {"char_embedder_highway_layers": 2, "no_token_positional_embeddings": False}
    given |= {"share_decoder_input_output_embed": False, **SMALL, **options}
    for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff"):
        if name in given:
            given[name] = ",".join(map(str, given[name]))
    return Namespace(**given)


def upstream_model(task, **options):
    """fairseq's own model at toy size, in evaluation mode, with weights that are all away from their initial values."""
    model = scramble(upstream.LightConvLanguageModel.build_model(arguments(**options), task).eval())
    for name, p in model.named_parameters():
        if "conv_bias" in name:
            p.data.fill_(float("nan"))  # what uninitialised memory may hold
    return model


@pytest.mark.parametrize("options", PARITY)
@torch.no_grad()
def test_parity_with_fairseqs_own_model(options):
    task = lm_task()
    theirs = upstream_model(task, **options)
    ours = build_lm("lightconv_lm", task, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    previous = tokens(3, 12)  # longer than the kernels: fairseq's softmax is wrong for shorter sentences
    expected = log_probabilities(theirs, previous)
    assert expected.isfinite().all() and expected.abs().max() > 1
    torch.testing.assert_close(log_probabilities(ours, previous), expected, atol=1e-4, rtol=1e-5)
    # fairseq 0.12.2 has an untied output projection before all else: there, --reset-optimizer is needed.
    assert hasattr(theirs.decoder, "embed_out") or shapes(ours) == shapes(theirs)


def released_2019(state, *, tied: bool = False):
    """The layout of fairseq ≤ 0.12.2 and of TaLK, made of today's."""
    old = {}
    for key, value in state.items():
        if "conv_bias" in key or (tied and key == "decoder.output_projection.weight"):
            continue
        old[key.replace("output_projection.weight", "embed_out")] = value
    old["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    return old


@pytest.mark.parametrize(
    "kind, embedding",
    [
        *(("dynamic", embedding) for embedding in ("plain", "shared", "adaptive-tied-proj", "no-positions")),
        ("lightweight", "plain"),
        ("lightweight-cuda", "shared"),
    ],
)
@torch.no_grad()
def test_older_layouts_load_strictly(kind, embedding):
    task, options = lm_task(), {"decoder_conv_type": kind.split("-")[0], **EMBEDDINGS[embedding]}
    theirs = upstream_model(task, **options)
    state = released_2019(theirs.state_dict(), tied=embedding == "shared")
    if kind.endswith("cuda"):
        state = {k: v.squeeze(1) if k.endswith("conv.weight") else v for k, v in state.items()}
    ours = build_lm("lightconv_lm", task, **options)
    ours.load_state_dict(state, strict=True)
    previous = tokens(3, 12)
    torch.testing.assert_close(
        log_probabilities(ours, previous), log_probabilities(theirs, previous), atol=1e-4, rtol=1e-5
    )


# Where a block's parameters are in TaLK's files, and here.
TALK_NAMES = {
    "self_attn.linear1.": "linear1.",
    "self_attn.linear2.": "linear2.",
    "self_attn.conv.": "conv.",
    "self_attn_layer_norm.": "conv_layer_norm.",
}


@pytest.mark.parametrize("embedding", ["plain", "shared", "adaptive-tied-proj"])
@torch.no_grad()
def test_talks_layout_loads_strictly(embedding):
    task, options = lm_task(), EMBEDDINGS[embedding]
    model = scramble(build_lm("talkconv_lm", task, **options))
    state = {}
    for key, value in model.state_dict().items():
        for ours, theirs in TALK_NAMES.items():
            key = key.replace(ours, theirs)
        state[key] = value
    state["decoder.version"] = torch.Tensor([2])
    state = released_2019(state, tied=embedding == "shared")
    blocks = {key.removeprefix("decoder.layers.1.") for key in state if key.startswith("decoder.layers.1.")}
    modules = ["linear1", "linear2", "conv.offsets", "conv_layer_norm", "fc1", "fc2", "final_layer_norm"]
    assert blocks == {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    other = build_lm("talkconv_lm", task, **options)
    other.load_state_dict(state, strict=True)
    previous = tokens(3, 12)
    torch.testing.assert_close(log_probabilities(other, previous), log_probabilities(model, previous))


@pytest.mark.parametrize("cutoff", ["8,20", "8"])
@torch.no_grad()
def test_a_whole_file_of_2019_loads_like_any_checkpoint(tmp_path, cutoff):
    """As in fairseq-eval-lm: arguments in a Namespace, the architecture by its upstream name, nothing else known."""
    words = dictionary(30)
    words.save(str(tmp_path / "dict.txt"))
    known = {"arch": "lightconv_lm", "task": "language_modeling", "criterion": "adaptive_loss", "optimizer": "nag"}
    known |= {"lr_scheduler": "cosine", "data": str(tmp_path), "sample_break_mode": "none"}
    known |= {"self_target": False, "future_target": False, "past_target": False, "max_target_positions": None}
    known |= {"output_dictionary_size": -1}
    args = arguments(**known, adaptive_softmax_cutoff=[int(c) for c in cutoff.split(",")])
    theirs = scramble(upstream.LightConvLanguageModel.build_model(args, lm_task()).eval())
    assert args.adaptive_softmax_cutoff == cutoff
    file = tmp_path / "model.pt"
    write_old_file(file, args, released_2019(theirs.state_dict()))
    (ours,), _ = checkpoint_utils.load_model_ensemble([str(file)], task=None)
    assert type(ours).__module__.startswith("lightconv_plugin.")
    assert ours.max_positions() == 64
    previous = tokens(3, 12)
    torch.testing.assert_close(
        log_probabilities(ours.eval(), previous), log_probabilities(theirs, previous), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("embedding", ["plain", "shared", "adaptive-tied-proj", "characters"])
def test_our_own_state_survives_a_round_trip(embedding):
    options = {"decoder_conv_type": "dynamic,talk,attention", **EMBEDDINGS[embedding]}
    model, other = build_lm(**options), build_lm(**options)
    other.load_state_dict(model.state_dict(), strict=True)
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        # fairseq's marker of the device is memory that nobody has written.
        assert torch.equal(a, b) or name.endswith("._float_tensor"), name
