"""`lightconv convert`: each layout into the others and back, bit for bit; fairseq's own classes load what it writes."""

from argparse import Namespace
from dataclasses import fields

import pytest
import torch

from lightconv_plugin.tools import cli
from lightconv_plugin.tools.average import average
from lightconv_plugin.tools.common import CommandError

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, models
from fairseq.models import lightconv as upstream
from fairseq.models import lightconv_lm as upstream_lm

from lightconv_plugin.tools.convert import CannotReorder, convert, reorder
from lightconv_plugin.tools.layouts import parameter_order, read_model
from tests.models import test_checkpoints as others
from tests.models.language_model_toys import EMBEDDINGS, build_lm, lm_task, log_probabilities, scramble, tokens
from tests.models.language_model_toys import SMALL as SMALL_LM
from tests.models.test_language_model_checkpoints import arguments as lm_arguments
from tests.models.test_language_model_checkpoints import released_2019 as lm_released_2019
from tests.models.toys import SMALL, batch, build, dictionary, task

# fairseq ≤ 0.12.2 has other classes under the same names, and is not what "fairseq" means here.
NEW_FAIRSEQ = hasattr(upstream.LightConvEncoderLayer(Namespace(
    encoder_embed_dim=4, encoder_conv_dim=4, encoder_glu=False, encoder_conv_type="lightweight", weight_softmax=True,
    encoder_attention_heads=1, weight_dropout=0, dropout=0, relu_dropout=0, input_dropout=0,
    encoder_normalize_before=False, encoder_ffn_embed_dim=4), 3), "layer_norm1")  # fmt: skip
with_new_fairseq = pytest.mark.skipif(
    not NEW_FAIRSEQ, reason="needs a fairseq whose LightConv is that of its main branch"
)


def settings(architecture, **options):
    """All options of one of our architectures, as fairseq saves them under cfg."""
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    values = {f.name: getattr(config, f.name) for f in fields(config) if not f.name.startswith("_")}
    assert options.keys() <= values.keys()
    return {"_name": architecture, **values, **options}


def checkpoint(path, model, section, **more):
    """A file as fairseq's trainer writes it, with settings under cfg."""
    cfg = {
        "_name": None,
        "common": {"_name": None, "user_dir": "/somewhere/lightconv_plugin", "seed": 1},
        "model": section,
        "task": {"_name": "translation", "data": "data-bin", "source_lang": "de"},
        "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    }
    history = [{"num_updates": 7, "criterion_name": "C", "optimizer_name": "O", "lr_scheduler_state": {}}]
    content = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": history, "task_state": {}}
    torch.save({**content, "extra_state": {"epoch": 1}, "last_optimizer_state": None, **more}, path)
    return path


def run(*arguments):
    return cli.main(["convert", *map(str, arguments)])


def load(path):
    return torch.load(path, weights_only=False)


def same(left, right):
    """Bitwise equality of two state dictionaries, names, shapes, types and ties."""
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key

    def ties(state):
        return sorted(sorted(k for k in state if state[k].data_ptr() == v.data_ptr()) for v in state.values())

    assert ties(left) == ties(right)


MIXED = {"encoder_conv_type": "lightweight", "decoder_conv_type": "dynamic"}
LIGHTCONVS = [
    pytest.param("dynamicconv_iwslt_de_en", {}, id="dynamic"),
    pytest.param("lightweightconv_wmt_en_de", {}, id="lightweight"),
    pytest.param("dynamicconv", {**MIXED, "share_decoder_input_output_embed": True}, id="mixed-tied"),
    pytest.param("dynamicconv", {"share_all_embeddings": True}, id="all-shared"),
    pytest.param("dynamicconv_cnndm", {"weight_normalization": "none"}, id="no-softmax"),
    pytest.param(
        "lightweightconv",
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "encoder_learned_pos": True},
        id="prenorm-learned",
    ),
    pytest.param(
        "dynamicconv", {"encoder_conv_dim": 32, "decoder_conv_dim": 8, "decoder_kernel_size_list": [5]}, id="dims"
    ),
    pytest.param("dynamicconv", {"adaptive_softmax_cutoff": [8, 20]}, id="adaptive-softmax"),
]


def small(options):
    return {**SMALL, "dropout": 0.0, "attention_dropout": 0.0, **options}


@pytest.fixture
def their_task():
    return task(dictionary(30))


@with_new_fairseq
@pytest.mark.parametrize("architecture, options", LIGHTCONVS)
@torch.no_grad()
def test_fairseqs_own_class_loads_it_strictly_and_computes_the_same(
    architecture, options, their_task, tmp_path, capsys
):
    options = small(options)
    ours = scramble(build(architecture, their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "fairseq") == 0
    converted = load(tmp_path / "theirs.pt")
    args = converted["cfg"]["model"]
    assert isinstance(args, Namespace) and args.arch == args._name
    assert args.arch.startswith("lightconv") and converted["cfg"]["common"]["user_dir"] is None
    theirs = upstream.LightConvModel.build_model(Namespace(**vars(args)), their_task).eval()
    theirs.load_state_dict(converted["model"], strict=True)
    inputs = batch((12, 9, 7), (9, 9, 9))
    expected = ours(*inputs)[0]
    assert expected.isfinite().all() and expected.abs().max() > 1
    torch.testing.assert_close(theirs(*inputs)[0], expected, atol=1e-5, rtol=1e-5)
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])
    assert capsys.readouterr().out.count("written to") == 2


@pytest.mark.parametrize("layout", ["fairseq", "fairseq-0.12.2"])
@pytest.mark.parametrize("architecture, options", LIGHTCONVS)
@torch.no_grad()
def test_there_and_back_is_the_same_model(architecture, options, layout, their_task, tmp_path):
    options = small(options)
    ours = scramble(build(architecture, their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", layout) == 0
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    section = back["cfg"]["model"]
    name = section["_name"]
    assert name == architecture.removesuffix("_cnndm")
    rebuilt = build(name, their_task, small=False, **{k: v for k, v in section.items() if k != "_name"})
    rebuilt.load_state_dict(back["model"], strict=True)
    inputs = batch((12, 9, 7), (9, 3, 9))
    assert torch.equal(rebuilt(*inputs)[0], ours(*inputs)[0])
    for name in ("optimizer_history", "task_state", "extra_state"):
        assert back[name] == load(source)[name]


@with_new_fairseq
@pytest.mark.parametrize("kind", ["dynamic", "lightweight"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_old_layout_is_that_of_the_released_files(kind, tied, their_task, tmp_path):
    """`released_2019` of the models' tests, written from the old code, makes the same of fairseq's model of today."""
    options = {"encoder_conv_type": kind, "decoder_conv_type": kind, "share_decoder_input_output_embed": tied}
    options |= {"encoder_normalize_before": True, "decoder_normalize_before": True}
    theirs = others.upstream_model(their_task, **options)
    args = Namespace(
        **{**SMALL, "arch": "lightconv_iwslt_de_en", "weight_softmax": True, **options, "encoder_glu": True}
    )
    args.decoder_glu, args.user_dir = True, "/somewhere"
    old = others.released_2019(theirs.state_dict(), tied=tied)
    source = tmp_path / "new.pt"
    torch.save({"args": args, "cfg": None, "model": theirs.state_dict(), "optimizer_history": []}, source)
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    got = load(tmp_path / "old.pt")
    assert got["model"].keys() == old.keys()
    for key, value in old.items():
        assert torch.equal(got["model"][key], value), key
    assert (got["args"].arch, got["args"].user_dir, got["cfg"]) == ("lightconv_iwslt_de_en", None, None)
    # And from there to the new one again, but for what the new one never initialises.
    assert run(tmp_path / "old.pt", tmp_path / "again.pt", "--to", "fairseq") == 0
    again = load(tmp_path / "again.pt")["model"]
    assert again.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(again[key], value) or (key.endswith("conv_bias") and not again[key].any()), key


@torch.no_grad()
def test_filters_of_the_cuda_layer_get_their_dimension(their_task, tmp_path):
    ours = scramble(build("lightweightconv", their_task, **SMALL))
    source = checkpoint(tmp_path / "ours.pt", ours, settings("lightweightconv", **SMALL))
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    content = load(tmp_path / "old.pt")
    content["model"] = others.cuda_trained(content["model"])
    torch.save(content, tmp_path / "cuda.pt")
    assert run(tmp_path / "cuda.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])


# ------------------------------------------------------------------------------------------------ TaLK


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_talk_there_and_back(tied, their_task, tmp_path):
    options = small({"share_decoder_input_output_embed": tied, "relu_dropout": 0.2})
    ours = scramble(build("talkconv_wmt_en_de_big", their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings("talkconv_wmt_en_de_big", **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "talk") == 0
    got = load(tmp_path / "theirs.pt")
    assert got["cfg"] is None
    args = got["args"]
    assert (args.arch, args.task, args.criterion) == (
        "talkconv_wmt_en_de_big",
        "translation",
        "label_smoothed_cross_entropy",
    )
    assert (args.data, args.source_lang, args.seed, args.user_dir) == ("data-bin", "de", 1, None)
    assert (args.encoder_conv_dim, args.encoder_kernel_size_list, args.relu_dropout) == (16, [3, 5, 9], 0.2)
    published = others.published_talk(ours.state_dict(), tied=tied)
    positions = {f"{side}.embed_positions._float_tensor" for side in ("encoder", "decoder")}
    assert got["model"].keys() == published.keys() | positions
    for key, value in published.items():
        assert torch.equal(got["model"][key], value) or key.endswith(".version"), key
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])
    assert load(tmp_path / "back.pt")["args"].arch == "talkconv_wmt_en_de_big"


# ------------------------------------------------------------------------------------------------ language models


def lm_settings(architecture, **options):
    return settings(architecture, **{**SMALL_LM, "tokens_per_sample": 64, "max_target_positions": None, **options})


@with_new_fairseq
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@torch.no_grad()
def test_language_models_of_fairseq(embedding, tmp_path):
    options, lm = EMBEDDINGS[embedding], lm_task()
    ours = scramble(build_lm("dynamicconv_lm_gbw", lm, dropout=0.0, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("dynamicconv_lm_gbw", dropout=0.0, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "fairseq") == 0
    converted = load(tmp_path / "theirs.pt")
    args = converted["cfg"]["model"]
    assert args.arch == "lightconv_lm_gbw"
    theirs = upstream_lm.LightConvLanguageModel.build_model(Namespace(**vars(args)), lm).eval()
    theirs.load_state_dict(converted["model"], strict=True)
    previous = tokens(3, 12)
    torch.testing.assert_close(
        log_probabilities(theirs, previous), log_probabilities(ours, previous), atol=1e-4, rtol=1e-5
    )
    assert run(tmp_path / "theirs.pt", tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    tied = options.get("share_decoder_input_output_embed", False)
    expected = set(lm_released_2019(theirs.state_dict(), tied=tied))
    if embedding in ("no-positions", "learned-positions"):
        expected -= {"decoder.embed_positions._float_tensor"}
    assert load(tmp_path / "old.pt")["model"].keys() == expected
    assert run(tmp_path / "old.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    assert back["cfg"]["model"]["_name"] == "dynamicconv_lm_gbw"


@pytest.mark.parametrize("embedding", ["plain", "shared", "adaptive-tied-proj"])
@torch.no_grad()
def test_language_models_of_talk(embedding, tmp_path):
    options, lm = EMBEDDINGS[embedding], lm_task()
    ours = scramble(build_lm("talkconv_lm", lm, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("talkconv_lm", **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "talk") == 0
    theirs = load(tmp_path / "theirs.pt")
    assert theirs["args"].arch == "talkconv_lm" and theirs["args"].max_target_positions == 64
    assert "decoder.layers.1.conv.offsets.weight" in theirs["model"]
    assert ("decoder.embed_out" in theirs["model"]) == (embedding == "plain")
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])


@torch.no_grad()
def test_the_arguments_of_an_old_language_model_suffice(tmp_path):
    """What the architecture's name stands for is written out."""
    lm = lm_task()
    ours = scramble(build_lm("lightweightconv_lm", lm))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("lightweightconv_lm"))
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    args = lm_arguments(arch="lightconv_lm", decoder_conv_type="lightweight", max_target_positions=None)
    torch.save({"args": args, "model": load(tmp_path / "old.pt")["model"]}, tmp_path / "2019.pt")
    assert run(tmp_path / "2019.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    assert back["args"].arch == "lightweightconv_lm" and back["args"].decoder_glu is True


# ------------------------------------------------------------------------------------------------ the optimizer


def trained(model, inputs, optimizer_state=None, steps=2):
    """Adam's steps towards nothing in particular; the optimizer's state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if optimizer_state:
        optimizer.load_state_dict(optimizer_state)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs)[0].log_softmax(-1)[..., 5].mean().neg().backward()
        optimizer.step()
    return optimizer.state_dict()


@with_new_fairseq
@pytest.mark.parametrize("kind", ["dynamic", "lightweight"])
def test_a_training_of_fairseq_goes_on_here(kind, their_task, tmp_path, capsys):
    options = {"encoder_conv_type": kind, "decoder_conv_type": kind, "encoder_glu": True, "decoder_glu": True}
    theirs = others.upstream_model(their_task, **options)
    inputs = batch((12, 9, 7), (9, 9, 9))
    history = trained(theirs, inputs)
    args = Namespace(**{**SMALL, **options, "arch": "lightconv", "weight_softmax": True, "dropout": 0.0})
    file = tmp_path / "theirs.pt"
    torch.save({"args": args, "model": theirs.state_dict(), "last_optimizer_state": history}, file)
    assert run(file, tmp_path / "ours.pt", "--to", "plugin") == 0
    assert "the optimizer's state is kept" in capsys.readouterr().out
    content = load(tmp_path / "ours.pt")
    ours = build("dynamicconv", their_task, small=False, **{k: v for k, v in vars(args).items() if k != "arch"})
    ours.load_state_dict(content["model"], strict=True)
    trained(theirs, inputs, history, steps=1)
    trained(ours, inputs, content["last_optimizer_state"], steps=1)
    fresh = build("dynamicconv", their_task, small=False, **{k: v for k, v in vars(args).items() if k != "arch"})
    fresh.load_state_dict(content["model"], strict=True)
    trained(fresh, inputs, steps=1)
    expected, got = theirs(*inputs)[0], ours(*inputs)[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert (fresh(*inputs)[0] - expected).abs().max() > 1e-3
    # And there again: the entries are those that fairseq had.
    assert run(tmp_path / "ours.pt", tmp_path / "again.pt", "--to", "fairseq") == 0
    again = load(tmp_path / "again.pt")["last_optimizer_state"]
    assert again["param_groups"] == history["param_groups"]
    before = load(file)["last_optimizer_state"]["state"]
    assert again["state"].keys() == before.keys()
    assert all(torch.equal(again["state"][i]["exp_avg"], before[i]["exp_avg"]) for i in before)


def in_a_row(theirs, history):
    """fairseq's --fp16 has one entry for all parameters in a row; one without a gradient counts as zero."""
    shapes = [p.shape for p in theirs.parameters()]

    def row(key):
        zero = {key: None}
        values = (history["state"].get(i, zero)[key] for i in range(len(shapes)))
        return torch.cat(
            [torch.zeros(s).flatten() if v is None else v.flatten() for v, s in zip(values, shapes, strict=True)]
        )

    entry = {"step": 2, "exp_avg": row("exp_avg"), "exp_avg_sq": row("exp_avg_sq")}
    return {"state": {0: entry}, "param_groups": [{"lr": 0.01, "params": [0]}], "loss_scale": 4.0}


@with_new_fairseq
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_optimizer_over_all_parameters_in_a_row(tied, their_task, tmp_path):
    options = {"encoder_conv_type": "dynamic", "decoder_conv_type": "dynamic", "share_decoder_input_output_embed": tied}
    theirs = others.upstream_model(their_task, **options)
    history = in_a_row(theirs, trained(theirs, batch((12, 9, 7), (9, 9, 9))))
    args = Namespace(**{**SMALL, **options, "arch": "lightconv", "encoder_glu": True, "decoder_glu": True})
    torch.save({"args": args, "model": theirs.state_dict(), "last_optimizer_state": history}, tmp_path / "theirs.pt")
    previous = tmp_path / "theirs.pt"
    for layout in ("plugin", "fairseq-0.12.2", "plugin", "fairseq"):
        previous, last = tmp_path / f"{layout}-{previous.stem[:3]}.pt", previous
        assert run(last, previous, "--to", layout) == 0
        row = load(previous)["last_optimizer_state"]["state"][0]["exp_avg"]
        unused = sum(p.numel() for name, p in theirs.named_parameters() if name.endswith("conv_bias"))
        assert len(row) == sum(p.numel() for p in theirs.parameters()) - (unused if layout != "fairseq" else 0)
    again = load(previous)["last_optimizer_state"]
    assert again["loss_scale"] == 4.0 and again["param_groups"] == history["param_groups"]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(again["state"][0][key], history["state"][0][key])


@with_new_fairseq
@pytest.mark.parametrize("architecture, options", LIGHTCONVS)
def test_the_order_is_that_of_fairseqs_own_parameters(architecture, options, their_task):
    options = small(options)
    ours = build(architecture, their_task, **options)
    model = read_model(settings(architecture, **options), architecture, ours.state_dict())
    theirs = convert_in_memory(ours, architecture, options, their_task)
    expected = [(name.endswith("conv_bias"), tuple(p.shape)) for name, p in theirs.named_parameters()]
    assert [(name is None, shape) for name, shape in parameter_order("fairseq", model)] == expected


def convert_in_memory(ours, architecture, options, their_task):
    from lightconv_plugin.tools.layouts import options_in

    model = read_model(settings(architecture, **options), architecture, ours.state_dict())
    return upstream.LightConvModel.build_model(Namespace(**options_in("fairseq", model)[0]), their_task)


def test_an_untied_output_comes_first_of_the_decoder_in_the_old_layout(their_task):
    ours = build("dynamicconv", their_task, **SMALL)
    model = read_model(settings("dynamicconv", **SMALL), "dynamicconv", ours.state_dict())
    names = [name for name, _ in parameter_order("fairseq-0.12.2", model)]
    first = next(i for i, name in enumerate(names) if name.startswith("decoder."))
    assert names[first : first + 2] == ["decoder.output_projection.weight", "decoder.embed_tokens.weight"]


ORDER = [("a", (2, 3)), ("b", (4,))]


@pytest.mark.parametrize(
    "state, said",
    [
        ({"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}, "one optimizer over one group"),
        ({"adam": {}, "nag": {}}, "one optimizer over one group"),
        ({"state": {}, "param_groups": [{"params": [0, 1, 2]}]}, "is of 3 parameters, the model has 2"),
        (
            {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"params": [0, 1]}]},
            "exp_avg of a has shape (3, 2), the parameter (2, 3)",
        ),
        (
            {"state": {0: {"exp_avg": torch.ones(12)}}, "param_groups": [{"params": [0]}]},
            "exp_avg has shape (12,), the model 10 parameters",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_dropped_and_said(state, said):
    with pytest.raises(CannotReorder, match=said.replace("(", r"\(").replace(")", r"\)")):
        reorder(state, ORDER, ORDER[::-1])


def test_what_is_dropped_is_said(their_task, tmp_path, capsys):
    options = small({"encoder_layerdrop": 0.1})
    ours = build("dynamicconv", their_task, **options)
    source = checkpoint(
        tmp_path / "a.pt", ours, settings("dynamicconv", **options), last_optimizer_state={"adam": {}},
        extra_state={"epoch": 3, "ema": ours.state_dict()},
    )  # fmt: skip
    assert run(source, tmp_path / "b.pt", "--to", "fairseq") == 0
    out = capsys.readouterr().out
    assert "dynamicconv in the layout plugin → lightconv in the layout fairseq" in out
    assert "left out, being about training only: encoder_layerdrop=0.1" in out
    assert "the optimizer's state is dropped: it is not of one optimizer" in out and "--reset-optimizer" in out
    assert "the exponential moving average of the parameters is dropped" in out
    got = load(tmp_path / "b.pt")
    assert got["last_optimizer_state"] is None and got["extra_state"] == {"epoch": 3}


# ------------------------------------------------------------------------------------------------ refusals


CANNOT = [
    (
        "dynamicconv",
        {"decoder_conv_type": "dynamic,dynamic,attention"},
        "fairseq",
        "--decoder-conv-type dynamic,dynamic,att",
    ),
    (
        "talkconv",
        {},
        "fairseq",
        "--encoder-conv-type talk,talk,talk: it has one of dynamic, lightweight for all layers",
    ),
    ("dynamicconv", {}, "talk", "--encoder-conv-type dynamic,dynamic,dynamic: it has one of talk"),
    ("dynamicconv", {"encoder_conv_type": "window_attention"}, "fairseq", "--encoder-conv-type window_attention,"),
    (
        "dynamicconv",
        {"weight_normalization": "l2"},
        "fairseq-0.12.2",
        "--weight-normalization l2: it has softmax and none",
    ),
    ("dynamicconv", {"activation_fn": "gelu"}, "fairseq", "--activation-fn gelu: it has relu"),
    ("talkconv", {"activation_fn": "relu"}, "talk", "--activation-fn relu: it has swish"),
    ("dynamicconv", {"layernorm_embedding": True}, "fairseq", "--layernorm-embedding True: it has no such option"),
]


@pytest.mark.parametrize(
    "architecture, options, layout, said", CANNOT, ids=[case[-1].split()[0][2:] for case in CANNOT]
)
def test_what_a_layout_cannot_express_is_refused(architecture, options, layout, said, their_task, tmp_path):
    options = small(options)
    ours = build(architecture, their_task, **options)
    source = checkpoint(tmp_path / "a.pt", ours, settings(architecture, **options))
    with pytest.raises(CommandError) as error:
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
        "parameters that are unknown for dynamicconv: encoder.layers.0.extra",
    ),
    "missing": (
        lambda c: c["model"].pop("decoder.layers.1.fc2.bias"),
        "parameters that are missing for dynamicconv: decoder.layers.1.fc2.bias",
    ),
    "shape": (
        lambda c: model_of(c).update(encoder_ffn_embed_dim=48),
        "encoder.layers.0.fc1.weight has shape (24, 16), but by the options it must have (48, 16)",
    ),
    "options": (
        lambda c: model_of(c).update(encoder_attention_heads=3),
        "no model can be built by its options: --encoder-attention-heads must divide",
    ),
    "cutoff": (lambda c: model_of(c).update(adaptive_softmax_cutoff="x"), "no model can be built by its options"),
    "architecture": (lambda c: model_of(c).update(_name="transformer"), "its architecture is transformer, none of"),
    "no-name": (lambda c: model_of(c).pop("_name"), "does not say which architecture it is of"),
    "no-settings": (lambda c: c.update(cfg=None), "has neither cfg nor args"),
    "text": (lambda c: c["model"].update(x="y"), "x is a str, not a tensor"),
    "no-model": (lambda c: c.pop("model"), "has no parameters under 'model'"),
    "no-embedding": (
        lambda c: c["model"].pop("decoder.embed_tokens.weight"),
        "no model can be built by its options",
    ),
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


def test_the_same_layout_and_the_same_file_are_refused(their_task, tmp_path, capsys):
    source = checkpoint(tmp_path / "a.pt", build("dynamicconv", their_task, **SMALL), settings("dynamicconv", **SMALL))
    before = source.read_bytes()
    assert run(source, tmp_path / "b.pt", "--to", "plugin") == 2
    assert "is in the layout plugin already" in capsys.readouterr().err
    assert run(source, tmp_path / "x" / ".." / "a.pt", "--to", "fairseq") == 2
    (tmp_path / "link.pt").symlink_to(source)
    assert run(source, tmp_path / "link.pt", "--to", "fairseq") == 2
    assert "is the file to convert: name another one" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    from tests.tools.test_average_loading import RunsACommand

    torch.save({"model": RunsACommand(tmp_path)}, tmp_path / "evil.pt")
    assert run(tmp_path / "evil.pt", tmp_path / "b.pt", "--to", "plugin") == 2
    assert "is refused" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ fairseq's loader


@pytest.mark.parametrize("layout", ["fairseq", "fairseq-0.12.2", "talk"])
@torch.no_grad()
def test_fairseqs_loader_takes_every_layout_and_its_average(layout, tmp_path):
    words = dictionary(30)
    (tmp_path / "data").mkdir()
    for language in ("de", "en"):
        words.save(str(tmp_path / "data" / f"dict.{language}.txt"))
    architecture = "talkconv" if layout == "talk" else "dynamicconv_iwslt_de_en"
    ours = scramble(build(architecture, task(words), **SMALL))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **SMALL))
    content = load(source)
    content["cfg"]["task"] |= {"data": str(tmp_path / "data"), "target_lang": "en", "left_pad_source": False}
    content["cfg"]["task"] |= {"left_pad_target": False}
    torch.save(content, source)
    inputs = batch((12, 9, 7), (9, 3, 9))
    assert run(source, tmp_path / "theirs.pt", "--to", layout) == 0
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    average([tmp_path / "theirs.pt"], tmp_path / "average.pt")
    for name in ("theirs", "back", "average"):
        (model,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / f"{name}.pt")], task=None)
        assert torch.equal(model.eval()(*inputs)[0], ours(*inputs)[0]), name
