"""Which checkpoints `lightconv average` reads, and which it refuses, never running anything that they hold."""

import pickle
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightconv_plugin.checkpoints import averaging
from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.errors import InputError
from tests.checkpoints.fairseq_files import lightconv, refused, save, state

# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "second, said",
    [
        ({"w": torch.ones(2, 3)}, "lacks b"),
        ({"w": torch.ones(2, 3), "b": torch.ones(3), "z": torch.ones(1)}, "also has z"),
        (
            {"w": torch.ones(2, 3), **{f"k{i}": torch.ones(1) for i in range(5)}},
            "lacks b and also has k0, k1, k2 and 2 more",
        ),
        ({"w": torch.ones(3, 2), "b": torch.ones(3)}, "w has shape (3, 2), but (2, 3) in"),
        ({"w": torch.ones(2, 3).half(), "b": torch.ones(3)}, "w is torch.float16, but torch.float32 in"),
        ({"w": torch.ones(2, 3), "b": torch.tensor([0, torch.nan, torch.nan])}, "2 of 3 values of b are NaN"),
        ({"w": torch.full((2, 3), -torch.inf), "b": torch.ones(3)}, "6 of 6 values of w are NaN or infinite"),
        ({"w": [1.0], "b": torch.ones(3)}, "w is a list, not a tensor"),
    ],
    ids=["missing-key", "extra-key", "many-keys", "shape", "dtype", "nan", "inf", "no-tensor"],
)
def test_a_file_that_does_not_fit_is_named(second, said, tmp_path, output, capsys):
    first = save(tmp_path / "first.pt", {"w": torch.ones(2, 3), "b": torch.ones(3)})
    bad = save(tmp_path / "bad.pt", second)
    message = refused(capsys, "--inputs", first, bad, "--output", output)
    assert said in message
    assert str(bad) in message
    assert list(output.parent.iterdir()) == []


def test_a_nan_in_the_first_file_is_refused(tmp_path, output, capsys):
    bad = save(tmp_path / "bad.pt", {"w": torch.tensor([torch.nan])})
    assert f"{bad}: 1 of 1 values of w" in refused(capsys, "--inputs", bad, "--output", output)


def test_the_bias_that_fairseq_never_initialises_may_hold_anything(tmp_path, output):
    """fairseq's DynamicConv saves a conv_bias (1, 1, C) of raw memory; no other parameter is excepted."""
    key = "encoder.layers.0.conv.conv_bias"
    values = [torch.tensor([[[torch.nan, 2.0, torch.inf]]]), torch.tensor([[[4.0, 4.0, 4.0]]])]
    files = [save(tmp_path / f"{i}.pt", {key: value}) for i, value in enumerate(values)]
    assert lightconv("--inputs", *files, "--output", output) == 0
    assert torch.load(output)["model"][key].tolist() == [[[2.0, 3.0, 2.0]]]
    with pytest.raises(InputError, match="NaN"):
        averaging.average([save(tmp_path / "ours.pt", {key: values[0].flatten()})], output, force=True)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04 not a zip", pickle.dumps({"model": 1}, protocol=4)],
    ids=["empty", "text", "fake-zip", "plain-pickle"],
)
def test_what_is_no_checkpoint_is_refused(content, tmp_path, output, capsys):
    bad = tmp_path / "bad.pt"
    bad.write_bytes(content)
    assert str(bad) in refused(capsys, "--inputs", bad, "--output", output)
    assert not output.exists()


def test_a_truncated_checkpoint_is_refused(tmp_path, output, capsys):
    bad = save(tmp_path / "bad.pt", {"w": torch.randn(10_000)})
    bad.write_bytes(bad.read_bytes()[:20_000])
    assert "truncated" in refused(capsys, "--inputs", bad, "--output", output)


@pytest.mark.parametrize("content", [{"w": torch.ones(1)}, {"model": {}}, {"model": torch.ones(1)}, [1]], ids=str)
def test_a_file_of_torch_that_is_no_checkpoint_is_refused(content, tmp_path, output, capsys):
    torch.save(content, tmp_path / "bad.pt")
    assert "not a checkpoint of fairseq" in refused(capsys, "--inputs", tmp_path / "bad.pt", "--output", output)


class SomethingElse:
    """Harmless, but not what a checkpoint holds."""


def test_an_unknown_class_is_refused_by_name(tmp_path, output, capsys):
    bad = save(tmp_path / "bad.pt", {"w": torch.ones(1)}, task_state={"x": SomethingElse()})
    said = refused(capsys, "--inputs", bad, "--output", output)
    assert "SomethingElse" in said
    assert "never code" in said


# ------------------------------------------------------------------------------------------------ what is allowed


def test_what_fairseq_writes_is_loaded(tmp_path, output):
    """Old settings, statistics of --eval-bleu as numpy numbers and arrays, and the layout from before torch 1.6."""
    path = tmp_path / "old.pt"
    statistics = {"bleu": np.float64(1.5), "counts": np.arange(4), "totals": np.ones(3, dtype=np.float32)}
    content = state({"w": torch.ones(2)}, args=Namespace(arch="lightconv"), cfg=None, extra_state=statistics)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert lightconv("--inputs", path, "--output", output) == 0
    got = safe_torch_load(output)
    assert got["args"] == Namespace(arch="lightconv")
    assert got["extra_state"]["bleu"] == 1.5
    assert got["extra_state"]["counts"].tolist() == [0, 1, 2, 3]


def renamed(path: Path, old: bytes, new: bytes) -> Path:
    """The same checkpoint with a global of its pickle under another name, as another version would have written it."""
    other = path.with_name(f"renamed-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            target.writestr(name, content)
    return other


def test_names_of_numpy_1_and_2_are_read(tmp_path):
    """numpy 1 calls the module numpy.core, numpy 2 numpy._core; a file may be of either."""
    path = save(tmp_path / "a.pt", {"w": torch.ones(1)}, extra_state={"n": np.arange(3)})
    here, there = b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"
    if int(np.__version__.split(".")[0]) < 2:
        here, there = there, here
    assert safe_torch_load(path)["extra_state"]["n"].tolist() == [0, 1, 2]
    assert safe_torch_load(renamed(path, here, there))["extra_state"]["n"].tolist() == [0, 1, 2]


class AverageMeter:
    """Stands for fairseq.meters.AverageMeter, which files of 2019 name."""

    def __init__(self):
        self.avg = 4.5


def test_meters_of_2019_are_read_and_left_out(tmp_path, output):
    meters = {"train_meters": {"loss": AverageMeter()}, "epoch": 1}
    path = save(tmp_path / "a.pt", {"w": torch.ones(1)}, extra_state=meters)
    old = renamed(path, f"c{__name__}\nAverageMeter\n".encode(), b"cfairseq.meters\nAverageMeter\n")
    assert lightconv("--inputs", old, "--output", output) == 0
    assert torch.load(output)["extra_state"] == {"epoch": 1}
