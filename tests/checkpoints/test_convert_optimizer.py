"""`lightconv convert`: the optimizer's state goes with the parameters, or it is said that it does not."""

from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.models import lightconv as upstream

from lightconv_plugin.checkpoints.layouts import read_model
from lightconv_plugin.checkpoints.optimizer_order import CannotReorder, parameter_order, reorder
from tests.checkpoints.conversions import LIGHTCONVS, checkpoint, load, run, settings, small, with_new_fairseq
from tests.models import test_checkpoints as others
from tests.models.toys import SMALL, batch, build


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
    assert "the optimizer state is kept" in capsys.readouterr().out
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
    theirs = convert_in_memory(ours, architecture, options, their_task)
    expected = [(name.endswith("conv_bias"), tuple(p.shape)) for name, p in theirs.named_parameters()]
    order = parameter_order("fairseq", ours.named_parameters())
    assert [(name is None, shape) for name, shape in order] == expected


def convert_in_memory(ours, architecture, options, their_task):
    from lightconv_plugin.checkpoints.layouts import options_in

    model = read_model(settings(architecture, **options), architecture, ours.state_dict())
    return upstream.LightConvModel.build_model(Namespace(**options_in("fairseq", model)[0]), their_task)


@pytest.mark.parametrize("layout", ["fairseq-0.12.2", "talk"])
def test_an_untied_output_comes_first_of_the_decoder_in_the_old_layouts(layout, their_task):
    ours = build("dynamicconv", their_task, **SMALL)
    names = [name for name, _ in parameter_order(layout, ours.named_parameters())]
    first = next(i for i, name in enumerate(names) if name.startswith("decoder."))
    assert names[first : first + 2] == ["decoder.output_projection.weight", "decoder.embed_tokens.weight"]


ORDER = [("a", (2, 3)), ("b", (4,))]


@pytest.mark.parametrize(
    "state, said",
    [
        ({"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}, "one optimizer over one group"),
        ({"adam": {}, "nag": {}}, "one optimizer over one group"),
        ({"state": {}, "param_groups": [{"params": [0, 1, 2]}]}, "it has 3 parameters, the model 2"),
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


def test_parameters_may_have_any_numbers():
    """torch in 2019 called them by their addresses."""
    state = {"state": {77: {"exp_avg": torch.ones(2, 3)}, 55: {"exp_avg": torch.ones(4)}}, "param_groups": [{}]}
    state["param_groups"][0]["params"] = [77, 55]
    found = reorder(state, ORDER, ORDER[::-1])
    assert [found["state"][i]["exp_avg"].shape for i in found["param_groups"][0]["params"]] == [(4,), (2, 3)]


def test_factored_moments_have_other_shapes_than_the_parameter():
    """Adafactor's."""
    factored = {"exp_avg_sq_row": torch.ones(2), "exp_avg_sq_col": torch.ones(3)}
    state = {"state": {0: factored, 1: {"exp_avg_sq": torch.ones(4)}}, "param_groups": [{"params": [0, 1]}]}
    assert reorder(state, ORDER, ORDER[::-1])["state"][1] is factored


def test_the_output_alone_is_trained(their_task):
    """All else is frozen."""
    module = build("dynamicconv", their_task, **small({"share_decoder_input_output_embed": False}))
    only = [entry for entry in module.named_parameters() if entry[0] == "decoder.output_projection.weight"]
    assert len(only) == len(parameter_order("fairseq-0.12.2", only)) == 1


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
    assert "left out, as they only matter in training: encoder_layerdrop=0.1" in out
    assert "the optimizer state is dropped: it does not belong to one optimizer" in out and "--reset-optimizer" in out
    assert "the exponential moving average of the parameters is dropped" in out
    got = load(tmp_path / "b.pt")
    assert got["last_optimizer_state"] is None and got["extra_state"] == {"epoch": 3}
