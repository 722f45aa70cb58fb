"""A checkpoint's optimizer is that of the model that goes on, and a checkpoint has no number that nobody set."""

import pickle
from argparse import Namespace
from importlib import metadata

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq import optim
from fairseq.modules import SinusoidalPositionalEmbedding

import lightconv_plugin.models  # noqa: F401 (the patches)

ADAM = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "use_old_adam": True, "fp16_adam_stats": False}
OPTIMIZERS = {"adam": ADAM, "nag": {"momentum": 0.9}, "adafactor": {
    "adafactor_eps": "(1e-30, 1e-3)", "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None, "scale_parameter": True,
    "relative_step": False, "warmup_init": False}}  # fmt: skip


def optimizer(name, *shapes):
    """fairseq's optimizer after an update of parameters of these shapes."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    settings = {"optimizer": name, "lr": [0.1], "weight_decay": 0.0, "tpu": False, **OPTIMIZERS[name]}
    made = optim.build_optimizer(Namespace(**settings), parameters)
    made.step()
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_go_on(name):
    saved = optimizer(name, (4, 3), (3,)).state_dict()
    again = optimizer(name, (4, 3), (3,))
    again.load_state_dict(saved, {"lr": 0.5})
    assert again.get_lr() == 0.5


@pytest.mark.parametrize("name", ["adam", "nag"])
def test_parameters_of_another_order_are_named(name):
    saved = optimizer(name, (2,), (4, 3), (3, 3)).state_dict()
    said = r"of other parameters: the shape of its parameter 2 is \(4, 3\), and the model's is \(3, 3\); --reset-opt"
    with pytest.raises(ValueError, match=said):
        optimizer(name, (2,), (3, 3), (4, 3)).load_state_dict(saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_number_of_parameters_is_named(name):
    saved = optimizer(name, (4, 3), (3,)).state_dict()
    with pytest.raises(ValueError, match="of 2 parameters, and the model here has 1; --reset-optimizer"):
        optimizer(name, (4, 3)).load_state_dict(saved)


def test_unpatched_another_order_fails_in_the_first_update(monkeypatch):
    patched = optim.FairseqOptimizer.load_state_dict
    [original] = [cell.cell_contents for cell in patched.__closure__ if callable(cell.cell_contents)]
    monkeypatch.setattr(optim.FairseqOptimizer, "load_state_dict", original)
    other = optimizer("adam", (3, 3), (4, 3))
    other.load_state_dict(optimizer("adam", (4, 3), (3, 3)).state_dict())
    with pytest.raises(RuntimeError, match="must match the size"):
        other.step()


def test_no_number_is_saved_that_nobody_set():
    """Memory may hold NaN, and has it here where a saved state is loaded; fairseq-fixed saves nothing."""
    old = metadata.packages_distributions()["fairseq"] == ["fairseq"]
    for _ in range(20):
        torch.full((1,), float("nan"))
        positions = SinusoidalPositionalEmbedding(8, 1, 16)
        assert list(positions.state_dict()) == (["_float_tensor"] if old else [])
        positions.load_state_dict({key: torch.full((1,), float("nan")) for key in positions.state_dict()})
        assert all(torch.equal(value, torch.zeros(1)) for value in positions.state_dict().values())
    assert pickle.loads(pickle.dumps(positions)) is not None
