"""Other people's checkpoints: fairseq's own LightConv in each layout it ever had, strictly, with equal numbers."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import lightconv as upstream

from .toys import SMALL, batch, build, dictionary, task, write_old_file


def upstream_model(task_, **options):
    """fairseq's own model at toy size, in evaluation mode, with weights that are all away from their initial values."""
    args = Namespace(**{**SMALL, "dropout": 0.0, "attention_dropout": 0.0, "weight_softmax": True, **options})
    model = upstream.LightConvModel.build_model(args, task_).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "conv_bias" in name:
                p.fill_(float("nan"))  # what uninitialised memory may hold
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in name and "weight" in name))
    return model


# The kernels are short where the decoder's softmax of fairseq is right for any length: T ≥ K. Both mixers with each
# option, each of them on either side.
PARITY = [
    pytest.param(dict(encoder_conv_type=e, decoder_conv_type=d, **o), id=f"{e}-{d}-{name}")
    for e, d in [("dynamic", "lightweight"), ("lightweight", "dynamic")]
    for name, o in {
        "glu": {"encoder_glu": True, "decoder_glu": True},
        "plain": {"encoder_glu": False, "decoder_glu": False},
        "prenorm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
        "convdim": {"encoder_conv_dim": 32, "decoder_conv_dim": 8},
        "tied": {"share_all_embeddings": True},
        "nosoftmax": {"weight_softmax": False},
    }.items()
]


@pytest.fixture
def their_task():
    return task(dictionary(30))


def shapes(model):
    named = model.named_parameters()
    return [("norm" in name, tuple(p.shape)) for name, p in named if not name.endswith("conv.conv_bias")]


@pytest.mark.parametrize("options", PARITY)
@torch.no_grad()
def test_parity_with_fairseqs_own_model(options, their_task):
    """Also in the order of the parameters, by which an optimizer's saved state goes.

    fairseq 0.12.2 has an untied output projection before all else.
    """
    theirs = upstream_model(their_task, **options)
    ours = build("lightconv", their_task, dropout=0.0, attention_dropout=0.0, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    source, lengths, previous = batch((12, 9, 7), (9, 9, 9))
    expected = theirs(source, lengths, previous)[0]
    assert expected.isfinite().all() and expected.abs().max() > 1
    torch.testing.assert_close(ours(source, lengths, previous)[0], expected, atol=1e-5, rtol=1e-5)
    assert hasattr(theirs.decoder, "embed_out") or shapes(ours) == shapes(theirs)


def released_2019(state, *, tied: bool):
    """The layout of fairseq ≤ 0.12.2, hence of the released files, made of today's."""
    old = {}
    for key, value in state.items():
        if "conv_bias" in key:
            continue
        if key == "decoder.output_projection.weight":
            if tied:
                continue
            key = "decoder.embed_out"
        old[key.replace("layer_norm1", "layer_norms.0").replace("layer_norm2", "layer_norms.1")] = value
    for side in ("encoder", "decoder"):
        old[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    return old


def cuda_trained(state):
    return {k: v.squeeze(1) if k.endswith("conv.weight") else v for k, v in state.items()}


def joint_attention_projection(state):
    """Very old files keep the three projections of attention in one tensor."""
    out = dict(state)
    for kind in ("weight", "bias"):
        for key in [k for k in state if k.endswith(f"encoder_attn.q_proj.{kind}")]:
            parts = [out.pop(key.replace("q_proj", f"{p}_proj")) for p in "qkv"]
            out[key.replace(f"q_proj.{kind}", f"in_proj_{kind}")] = torch.cat(parts)
    return out


@pytest.mark.parametrize(
    "kind, normalize_before, tied, old_attention",
    [
        ("dynamic", False, False, False),  # as released in 2019
        ("dynamic", True, True, True),
        ("lightweight", False, True, False),
        ("lightweight", True, False, True),
        ("lightweight-cuda", False, True, True),
        ("lightweight-cuda", True, False, False),
    ],
)
@torch.no_grad()
def test_older_layouts_load_strictly(kind, normalize_before, tied, old_attention, their_task):
    options = {
        "encoder_conv_type": kind.split("-")[0],
        "decoder_conv_type": kind.split("-")[0],
        "encoder_normalize_before": normalize_before,
        "decoder_normalize_before": normalize_before,
        "share_decoder_input_output_embed": tied,
    }
    theirs = upstream_model(their_task, **options)
    state = released_2019(theirs.state_dict(), tied=tied)
    state = cuda_trained(state) if kind.endswith("cuda") else state
    state = joint_attention_projection(state) if old_attention else state
    ours = build("lightconv", their_task, **options)
    ours.load_state_dict(state, strict=True)
    source, lengths, previous = batch((12, 9, 7), (9, 9, 9))
    torch.testing.assert_close(
        ours(source, lengths, previous)[0], theirs(source, lengths, previous)[0], atol=1e-5, rtol=1e-5
    )


def opened_as_of_2019(folder, state, **arguments):
    """As fairseq-generate opens a file: arguments in a Namespace, the architecture by its name, nothing else known."""
    (folder / "data").mkdir()
    for language in ("de", "en"):
        dictionary(30).save(str(folder / "data" / f"dict.{language}.txt"))
    known = {"task": "translation", "data": str(folder / "data"), "source_lang": "de", "target_lang": "en"}
    known |= {"criterion": "label_smoothed_cross_entropy", "label_smoothing": 0.1, "optimizer": "adam"}
    known |= {"lr_scheduler": "inverse_sqrt", "left_pad_target": "False", "share_all_embeddings": False}
    write_old_file(folder / "model.pt", Namespace(**SMALL, **known, **arguments), state)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(folder / "model.pt")], task=None)
    return model.eval()


@pytest.mark.parametrize("architecture", ["lightconv_iwslt_de_en", "somebodys_own"])
@torch.no_grad()
def test_a_whole_file_of_2019_loads_like_any_checkpoint(architecture, tmp_path):
    """Also if the code that registers its architecture is not imported."""
    convolutions = {"encoder_conv_type": "dynamic", "decoder_conv_type": "dynamic", "weight_softmax": True}
    theirs = upstream_model(task(dictionary(30)), **convolutions)
    dropout = {"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1, "input_dropout": 0.0}
    positions = {"max_source_positions": 1024, "max_target_positions": 1024, "left_pad_source": "True"}
    given = {"encoder_glu": True, "decoder_glu": True, **convolutions, **dropout, **positions}
    state = released_2019(theirs.state_dict(), tied=False)
    ours = opened_as_of_2019(tmp_path, state, arch=architecture, **given)
    assert type(ours).__module__.startswith("lightconv_plugin.")
    inputs = batch((12, 9, 7), (9, 9, 9))
    torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs)[0], atol=1e-5, rtol=1e-5)


def published_talk(state, *, tied: bool):
    """The layout of the published TaLK models, made of ours."""
    old = {key: value for key, value in released_2019(state, tied=tied).items() if "_float_tensor" not in key}
    names = {
        ".self_attn.linear": ".linear",
        ".self_attn.conv.": ".conv.",
        "encoder#.self_attn_layer_norm.": "encoder#.layer_norms.0.",
        "encoder#.final_layer_norm.": "encoder#.layer_norms.1.",
        "decoder#.self_attn_layer_norm.": "decoder#.conv_layer_norm.",
    }
    out = {}
    for key, value in old.items():
        layer = re.match(r"(encoder|decoder)(\.layers\.\d+)", key)
        for ours, theirs in names.items():
            ours, theirs = (name.replace("#", layer[2] if layer else "#") for name in (ours, theirs))
            key = key.replace(ours, theirs)
        out[key] = value
    return out


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_published_talk_layout_loads_strictly(tied, their_task):
    options = {"share_decoder_input_output_embed": tied}
    theirs, ours = (build("talkconv", their_task, **options) for _ in range(2))
    state = published_talk(theirs.state_dict(), tied=tied)
    # The names of its repository: talkconv/talkconv_fairseq/talkconv.py and talkconv_module.py.
    for key in (
        "encoder.layers.1.conv.offsets.weight",
        "encoder.layers.2.layer_norms.1.bias",
        "encoder.layers.0.linear1.weight",
        "decoder.layers.0.conv.offsets.bias",
        "decoder.layers.1.conv_layer_norm.weight",
        "decoder.layers.2.linear2.bias",
        "decoder.layers.2.encoder_attn.out_proj.weight",
        "decoder.layers.2.final_layer_norm.weight",
        *([] if tied else ["decoder.embed_out"]),
    ):
        assert key in state
    assert not [key for key in state if "self_attn" in key or "output_projection" in key]
    assert state["encoder.layers.0.conv.offsets.weight"].shape == (8, 16)
    assert state["decoder.layers.0.conv.offsets.weight"].shape == (4, 16)
    ours.load_state_dict(state, strict=True)
    inputs = batch((12, 9, 7), (9, 9, 9))
    assert torch.equal(ours(*inputs)[0], theirs(*inputs)[0])


@torch.no_grad()
def test_a_whole_talk_file_loads_by_its_architecture(tmp_path):
    """Its arguments know neither mixers nor activation: the architecture's name stands for both."""
    theirs = build("talkconv", task(dictionary(30)))
    given = {"encoder_glu": True, "decoder_glu": True, "max_source_positions": 1024, "max_target_positions": 1024}
    state = published_talk(theirs.state_dict(), tied=False)
    ours = opened_as_of_2019(tmp_path, state, arch="talkconv_iwslt_de_en", left_pad_source="False", **given)
    assert {layer.mixer.kind for layer in [*ours.encoder.layers, *ours.decoder.layers]} == {"talk"}
    inputs = batch((12, 9, 7), (9, 9, 9))
    assert torch.equal(ours(*inputs)[0], theirs(*inputs)[0])


@pytest.mark.parametrize(
    "encoder, decoder", [("lightweight,dynamic,talk", "attention,window_attention,depthwise"), ("conv", "conv")]
)
def test_our_own_state_survives_a_round_trip(encoder, decoder, their_task):
    options = {"encoder_conv_type": encoder, "decoder_conv_type": decoder, "decoder_normalize_before": True}
    model, other = (build(task_=their_task, **options) for _ in range(2))
    other.load_state_dict(model.state_dict(), strict=True)
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        # fairseq 0.12.2's marker of the device is memory that nobody has written.
        assert torch.equal(a, b) or name.endswith("._float_tensor"), name


def test_a_checkpoint_of_other_kernels_is_refused(their_task):
    with pytest.raises(RuntimeError, match=r"self_attn\.conv\.weight"):
        build(encoder_conv_type="lightweight", task_=their_task).load_state_dict(
            build(encoder_conv_type="lightweight", encoder_kernel_size_list=[3, 5, 7], task_=their_task).state_dict(),
            strict=True,
        )
