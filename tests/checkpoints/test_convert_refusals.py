"""`lightconv convert`: what cannot be converted is refused in one line, and nothing is written."""

import sys
from importlib.metadata import version

import pytest
import torch

from lightconv_plugin.errors import InputError

pytest.importorskip("fairseq")

from lightconv_plugin.checkpoints.conversion import convert
from tests import programs
from tests.checkpoints.conversions import checkpoint, load, run, settings, small
from tests.models.toys import SMALL, build

NAMED = not version("omegaconf").startswith("2.0.")  # older ones do not say which option is wrong
CANNOT = [
    (
        "dynamicconv",
        {"decoder_conv_type": "dynamic,dynamic,attention"},
        "fairseq",
        "decoder_conv_type=dynamic,dynamic,att",
    ),
    ("talkconv", {}, "fairseq", "encoder_conv_type=talk,talk,talk: it has one of dynamic, lightweight for all layers"),
    ("dynamicconv", {}, "talk", "encoder_conv_type=dynamic,dynamic,dynamic: it has one of talk"),
    ("dynamicconv", {"encoder_conv_type": "window_attention"}, "fairseq", "encoder_conv_type=window_attention,"),
    (
        "dynamicconv",
        {"weight_normalization": "l2"},
        "fairseq-0.12.2",
        "weight_normalization=l2: it has softmax and none",
    ),
    ("dynamicconv", {"activation_fn": "gelu"}, "fairseq", "activation_fn=gelu: it has relu"),
    ("talkconv", {"activation_fn": "relu"}, "talk", "activation_fn=relu: it has swish"),
    ("dynamicconv", {"decoder_dynamic_rank": [3]}, "fairseq", "decoder_dynamic_rank=[3]: it has no such option"),
    ("dynamicconv", {"dynamic_residual": True}, "fairseq-0.12.2", "dynamic_residual=True: it has no such option"),
    (
        "dynamicconv",
        {"decoder_cross_attention_conv": "q"},
        "fairseq",
        "decoder_cross_attention_conv=q: it has no such option",
    ),
    ("dynamicconv", {"layernorm_embedding": True}, "fairseq", "layernorm_embedding=True: it has no such option"),
    ("dynamicconv", {"quant_noise_pq": 0.1}, "fairseq", "quant_noise_pq=0.1: it has no linear layer after the embed"),
    ("dynamicconv", {"decoder_embed_dim": 24}, "fairseq", "decoder_embed_dim=24: it has encoder_embed_dim=16 on both"),
]


@pytest.mark.parametrize(
    "architecture, options, layout, said", CANNOT, ids=[case[-1].split()[0][2:] for case in CANNOT]
)
def test_what_a_layout_cannot_express_is_refused(architecture, options, layout, said, their_task, tmp_path):
    options = small(options)
    ours = build(architecture, their_task, **options)
    source = checkpoint(tmp_path / "a.pt", ours, settings(architecture, **options))
    with pytest.raises(InputError) as error:
        convert(source, layout)
    assert f"{source}: the layout {layout} cannot express {said}" in str(error.value)


def changed(path, ours, section, change):
    checkpoint(path, ours, section)
    content = load(path)
    change(content)
    torch.save(content, path)
    return path


def model_of(content):
    return content["cfg"]["model"]


BROKEN = {
    "unknown": (
        lambda c: c["model"].update({"encoder.layers.0.extra": torch.ones(1)}),
        "unknown parameters for dynamicconv: encoder.layers.0.extra",
    ),
    "missing": (
        lambda c: c["model"].pop("decoder.layers.1.fc2.bias"),
        "missing parameters for dynamicconv: decoder.layers.1.fc2.bias",
    ),
    "shape": (
        lambda c: model_of(c).update(encoder_ffn_embed_dim=48),
        "encoder.layers.0.fc1.weight has shape (24, 16), but the options require (48, 16)",
    ),
    "options": (
        lambda c: model_of(c).update(encoder_attention_heads=3),
        "no model can be built from its options: --encoder-attention-heads must divide",
    ),
    "cutoff": (lambda c: model_of(c).update(adaptive_softmax_cutoff="x"), "no model can be built from its options"),
    "architecture": (lambda c: model_of(c).update(_name="transformer"), "its architecture transformer is not"),
    "no-name": (lambda c: model_of(c).pop("_name"), "does not name its architecture"),
    "no-settings": (lambda c: c.update(cfg=None), "has neither cfg nor args"),
    "text": (lambda c: c["model"].update(x="y"), "x is a str, not a tensor"),
    "no-model": (lambda c: c.pop("model"), "has no parameters under 'model'"),
    "no-embedding": (
        lambda c: c["model"].pop("decoder.embed_tokens.weight"),
        "no model can be built from its options: there is no decoder.embed_tokens.weight",
    ),
    "embedding-without-rows": (
        lambda c: c["model"].update({"encoder.embed_tokens.weight": torch.tensor(1.0)}),
        "encoder.embed_tokens.weight must be a matrix, got shape ()",
    ),
    "version-without-value": (
        lambda c: c["model"].update({"encoder.version": torch.ones(0)}),
        "the parameters do not belong to dynamicconv",
    ),
    "version-that-is-complex": (
        lambda c: c["model"].update({"encoder.version": torch.ones(1, dtype=torch.complex64)}),
        "the parameters do not belong to dynamicconv",
    ),
    "layers": (
        lambda c: model_of(c).update(encoder_layers="x"),
        "Integer full_key: encoder_layers" if NAMED else "to Integer",
    ),
    "kernels": (
        lambda c: model_of(c).update(encoder_kernel_size_list=None),
        "encoder_kernel_size_list" if NAMED else "Non optional List",
    ),
    "positions": (lambda c: model_of(c).update(max_source_positions=-1), "no model can be built from its options"),
    "architecture-number": (lambda c: model_of(c).update(_name=5), "name of the architecture must be a text, got 5"),
    "cfg": (lambda c: c.update(cfg=5), "cfg must be a dictionary, got int 5"),
    "cfg-model": (lambda c: c["cfg"].update(model=5), "model in cfg must be a dictionary or a Namespace, got int 5"),
    "cfg-without-model": (lambda c: c["cfg"].pop("model"), "does not name its architecture"),
    "args": (lambda c: c.update(cfg=None, args=5), "args must be a Namespace or a dictionary, got int 5"),
    "setting-number": (lambda c: c["cfg"]["common"].update({1: 2}), "name of a setting in common must be a text"),
}


@pytest.mark.parametrize("change, said", BROKEN.values(), ids=BROKEN)
def test_files_that_are_wrong_are_refused_in_one_line(change, said, their_task, tmp_path, capsys):
    source = changed(
        tmp_path / "a.pt", build("dynamicconv", their_task, **SMALL), settings("dynamicconv", **SMALL), change
    )
    assert run(source, tmp_path / "b.pt", "--to", "fairseq") == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and str(source) in err
    assert [line for line in err.splitlines() if "error" in line] == [err.splitlines()[-1]]
    assert not (tmp_path / "b.pt").exists()


OPTIMIZERS = [
    {"param_groups": 5, "state": {}},
    {"param_groups": [5], "state": {}},
    {"param_groups": [{"params": [0]}], "state": {0: 5}},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["groups", "group", "entry"])
def test_an_optimizer_state_of_another_form_is_dropped(optimizer, their_task, tmp_path):
    model = build("dynamicconv", their_task, **SMALL)
    source = checkpoint(tmp_path / "a.pt", model, settings("dynamicconv", **SMALL), last_optimizer_state=optimizer)
    converted, notes = convert(source, "fairseq")
    assert converted["last_optimizer_state"] is None
    assert any("the optimizer state is dropped" in note for note in notes)


def test_the_same_layout_and_the_same_file_are_refused(their_task, tmp_path, capsys):
    source = checkpoint(tmp_path / "a.pt", build("dynamicconv", their_task, **SMALL), settings("dynamicconv", **SMALL))
    before = source.read_bytes()
    assert run(source, tmp_path / "b.pt", "--to", "plugin") == 2
    assert "is already in the layout plugin" in capsys.readouterr().err
    assert run(source, tmp_path / "x" / ".." / "a.pt", "--to", "fairseq") == 2
    (tmp_path / "link.pt").symlink_to(source)
    assert run(source, tmp_path / "link.pt", "--to", "fairseq") == 2
    assert "is also the file to convert: choose another name" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert run(tmp_path / "none.pt", source, "--to", "fairseq", "--force") == 2
    assert f"no such checkpoint: {tmp_path}/none.pt" in capsys.readouterr().err


def test_what_fairseq_logs_while_it_is_imported_is_not_shown(tmp_path):
    """In a process of its own, which has not imported it."""
    command = [sys.executable, "-m", "lightconv_plugin", "convert", tmp_path / "none.pt", tmp_path / "out.pt"]
    done = programs.run(*command, "--to", "fairseq", status=2)
    assert len(done.stderr.splitlines()) == 1 and "none.pt" in done.stderr
