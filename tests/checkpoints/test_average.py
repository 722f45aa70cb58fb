"""`lightconv average` against float64 numpy; what may come in and what goes out."""

import gc
import os
import weakref
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightconv_plugin.checkpoints import averaging
from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.checkpoints.fairseq_files import EPOCHS, lightconv, make, refused, save

# ------------------------------------------------------------------------------------------------ the mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_mean_is_the_float64_mean_in_the_original_type(number, dtype, tmp_path, output):
    values = [torch.randn(5, 4).to(dtype) for _ in range(number)]
    files = [save(tmp_path / f"{i}.pt", {"w": value}, i) for i, value in enumerate(values)]
    assert lightconv("--inputs", *files, "--output", output) == 0
    got = torch.load(output, weights_only=True)["model"]["w"]
    want = np.mean([value.double().numpy() for value in values], axis=0, dtype=np.float64)
    assert got.dtype == dtype
    if dtype == torch.float64:
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-15, atol=1e-16)
    else:
        assert torch.equal(got, torch.from_numpy(want).to(dtype))


@pytest.mark.parametrize("number", [3, 10])
def test_mean_of_equal_files_has_the_same_bits(number, tmp_path, output):
    model = {"w": torch.randn(100), "h": torch.randn(100).half(), "e": torch.empty(0, 3), "s": torch.tensor(0.1)}
    files = [save(tmp_path / f"{i}.pt", model) for i in range(number)]
    lightconv("--inputs", *files, "--output", output)
    got = torch.load(output)["model"]
    assert list(got) == list(model)
    assert all(torch.equal(got[key], model[key]) for key in model)


def test_settings_are_the_newest_and_what_belongs_to_one_step_is_dropped(tmp_path, output):
    files = []
    for i, updates in enumerate([200, 300, 100]):
        extra_state = {"val_loss": updates, "ema": {"w": torch.ones(1000)}, "ema_fp32_params": {"w": torch.ones(1000)}}
        earlier = {"num_updates": 1000 - updates, "optimizer": {"m": torch.ones(1000)}}  # of another training
        files.append(
            save(
                tmp_path / f"{i}.pt",
                {"w": torch.tensor([float(i)])},
                updates,
                args=Namespace(arch="dynamicconv", seed=updates),
                cfg={"seed": updates},
                optimizer_history=[earlier, {"num_updates": updates}],
                extra_state=extra_state,
            )
        )
    assert lightconv("--inputs", *files, "--output", output) == 0
    got = safe_torch_load(output)
    assert got["args"].seed == got["cfg"]["seed"] == got["extra_state"]["val_loss"] == 300
    assert got["optimizer_history"] == [{"num_updates": 700}, {"num_updates": 300}]
    assert got["averaged_from"] == ["0.pt", "1.pt", "2.pt"]
    assert "last_optimizer_state" not in got
    assert set(got["extra_state"]) == {"val_loss"}
    assert output.stat().st_size < files[0].stat().st_size - 3 * 4000 + 200


def test_files_without_update_counts_take_the_settings_of_the_first(tmp_path, output):
    files = [
        save(tmp_path / f"{i}.pt", {"w": torch.ones(1)}, cfg={"number": i}, optimizer_history=[]) for i in range(3)
    ]
    lightconv("--inputs", *files, "--output", output)
    assert torch.load(output)["cfg"] == {"number": 0}


def test_views_are_saved_without_the_memory_they_view(tmp_path, output):
    model = {"w": torch.randn(100_000)[:10], "n": torch.arange(100_000)[:10]}
    files = [save(tmp_path / f"{i}.pt", model) for i in range(2)]
    assert files[0].stat().st_size > 1_200_000
    lightconv("--inputs", *files, "--output", output)
    assert output.stat().st_size < 10_000


def test_one_checkpoint_is_in_memory_at_a_time(tmp_path, output, monkeypatch):
    alive = []
    load = averaging.load_checkpoint

    def watched(path):
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]
        loaded = load(path)
        alive.append(weakref.ref(loaded["model"]["w"]))
        return loaded

    monkeypatch.setattr(averaging, "load_checkpoint", watched)
    files = [save(tmp_path / f"{i}.pt", {"w": torch.randn(10)}, i) for i in range(4)]
    assert lightconv("--inputs", *files, "--output", output) == 0
    assert len(alive) == 4


@pytest.mark.parametrize("name", ["last", "best"])
def test_optimizer_states_are_not_read(name, tmp_path, output):
    state = {"last_optimizer_state": {"m": torch.ones(1 << 20)}}
    files = [save(tmp_path / f"{i}.pt", {"w": torch.full((3,), float(i))}, **state) for i in range(2)]
    loaded = averaging.load_checkpoint(files[0])
    assert str(files[0]) in Path("/proc/self/maps").read_text()
    files[0] = files[0].rename(tmp_path / f"checkpoint_{name}.pt")  # fairseq overwrites it in place
    last = averaging.load_checkpoint(files[0])
    del loaded
    assert files[0].name not in Path("/proc/self/maps").read_text() and last["model"]["w"].tolist() == [0] * 3
    torch.save(torch.load(files[1]), files[1], _use_new_zipfile_serialization=False)  # as by torch before 1.6
    assert lightconv("--inputs", *files, "--output", output) == 0
    assert torch.load(output)["model"]["w"].tolist() == [0.5] * 3


def test_a_checkpoint_that_is_written_while_it_is_read_is_averaged_again(tmp_path, output, monkeypatch):
    make(tmp_path, "checkpoint1.pt")
    files, load = [tmp_path / "checkpoint1.pt"], averaging.load_checkpoint

    def overwritten(path):
        loaded = load(path)
        os.utime(path, ns=(0, 0))
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(averaging, "load_checkpoint", overwritten)
        assert averaging.average_once(files, output, force=False)
    assert averaging.average_once(files, output, force=True)
    assert not averaging.average_once(files, output, force=True)


# ------------------------------------------------------------------------------------------------ tied parameters


def storages(model, *keys):
    return len({model[key].untyped_storage().data_ptr() for key in keys})


def tied(*groups):
    """{"a": t, "b": t, "c": u} for groups "ab", "c"."""
    model = {}
    for i, group in enumerate(groups):
        tensor = torch.randn(4) + i
        model.update(dict.fromkeys(group, tensor))
    return dict(sorted(model.items()))


@pytest.mark.parametrize(
    "files, remain",
    [
        ([["abc"], ["abc"]], ["abc"]),
        ([["abc"], ["ab", "c"]], ["ab", "c"]),
        ([["abc"], ["a", "bc"]], ["a", "bc"]),
        ([["a", "bc"], ["abc"]], ["a", "bc"]),
        ([["abc"], ["abc"], ["a", "b", "c"], ["abc"]], ["a", "b", "c"]),
        ([["ab", "cd"], ["ac", "bd"]], ["a", "b", "c", "d"]),
        ([["abcd"], ["ab", "cd"], ["abc", "d"]], ["ab", "c", "d"]),
    ],
    ids=lambda groups: "+".join("|".join(g) if isinstance(g, list) else g for g in groups),
)
def test_tied_parameters_stay_tied_where_they_are_in_every_file(files, remain, tmp_path, output):
    models = [tied(*groups) for groups in files]
    paths = [save(tmp_path / f"{i}.pt", model) for i, model in enumerate(models)]
    assert lightconv("--inputs", *paths, "--output", output) == 0
    got = torch.load(output)["model"]
    for key in models[0]:
        want = np.mean([model[key].double().numpy() for model in models], axis=0)
        np.testing.assert_allclose(got[key].numpy(), want, rtol=1e-6)
    assert [storages(got, *group) for group in remain] == [1] * len(remain)
    assert storages(got, *got) == len(remain)


def test_parts_of_one_tensor_are_not_tied(tmp_path, output):
    whole = torch.arange(4.0)
    parts = {
        "all": whole,
        "head": whole[:2],
        "tail": whole[2:],
        "square": whole.view(2, 2),
        "turned": whole.view(2, 2).t(),
    }
    files = [save(tmp_path / f"{i}.pt", parts) for i in range(2)]
    lightconv("--inputs", *files, "--output", output)
    got = torch.load(output)["model"]
    assert {key: value.tolist() for key, value in got.items()} == {key: value.tolist() for key, value in parts.items()}


# ------------------------------------------------------------------------------------------------ integers


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_equal_integers_are_kept(dtype, tmp_path, output):
    files = [save(tmp_path / f"{i}.pt", {"w": torch.ones(1), "n": torch.tensor([0, 1, 1], dtype=dtype)}) for i in "ab"]
    assert lightconv("--inputs", *files, "--output", output) == 0
    got = torch.load(output)["model"]["n"]
    assert got.dtype == dtype
    assert got.tolist() == [0, 1, 1]


def test_different_integers_are_refused(tmp_path, output, capsys):
    files = [save(tmp_path / f"{i}.pt", {"w": torch.ones(1), "n": torch.tensor([i])}) for i in range(2)]
    said = refused(capsys, "--inputs", *files, "--output", output)
    assert f"{files[1]}: n (torch.int64) differs from {files[0]}" in said
    assert not output.exists()


def test_a_counter_is_the_newest_one(tmp_path, output):
    key = "bn.num_batches_tracked"
    files = [
        save(tmp_path / f"{i}.pt", {"w": torch.ones(1), key: torch.tensor(n)}, updates=n)
        for i, n in enumerate([200, 300, 100])
    ]
    assert lightconv("--inputs", *files, "--output", output) == 0
    assert torch.load(output)["model"][key].item() == 300


# ------------------------------------------------------------------------------------------------ input and output


@pytest.mark.parametrize("kind", ["same", "dotted", "link"])
def test_an_input_is_never_overwritten(kind, tmp_path, capsys):
    make(tmp_path, "checkpoint1.pt", "checkpoint2.pt")
    before = (tmp_path / "checkpoint1.pt").read_bytes()
    target = {"same": tmp_path / "checkpoint1.pt", "dotted": tmp_path / "x" / ".." / "checkpoint1.pt"}.get(kind)
    (tmp_path / "x").mkdir()
    if target is None:
        target = tmp_path / "link.pt"
        target.symlink_to(tmp_path / "checkpoint1.pt")
    said = refused(capsys, "--inputs", tmp_path, "--num-epoch-checkpoints", 2, "--output", target)
    assert "is one of the checkpoints to average" in said
    assert (tmp_path / "checkpoint1.pt").read_bytes() == before


def test_an_earlier_average_is_replaced_only_with_force(tmp_path, output, capsys):
    make(tmp_path, *EPOCHS)
    for number, options, status in ((1, (), 0), (2, (), 2), (2, ("--force",), 0), (2, (), 0)):
        arguments = ("--inputs", tmp_path, "--num-epoch-checkpoints", number, "--output", output)
        assert lightconv(*arguments, *options) == status
        assert len(torch.load(output)["averaged_from"]) == (1 if status else number)
    assert f"{output} is already the mean of 2 checkpoints:\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "inputs, said",
    [
        (["none.pt"], "no such checkpoint"),
        (["checkpoint1.pt", "./checkpoint1.pt"], "is given twice"),
        ([".", "checkpoint1.pt"], "must be files or one folder"),
    ],
    ids=["missing", "twice", "folder-and-file"],
)
def test_wrong_inputs(inputs, said, tmp_path, output, capsys, monkeypatch):
    make(tmp_path, "checkpoint1.pt")
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "--inputs", *inputs, "--output", output)


def test_a_name_that_is_not_utf8(tmp_path, capsys):
    (folder := tmp_path / os.fsdecode(b"gr\xfcn")).mkdir()
    make(folder, "checkpoint1.pt")
    assert lightconv("--inputs", folder, "--num-epoch-checkpoints", 1, "--output", folder / "average.pt") == 0
    assert r"gr\udcfcn/average.pt" in capsys.readouterr().out
    assert safe_torch_load(folder / "average.pt")["averaged_files"]


def test_progress_is_shown(tmp_path, output, capsys):
    make(tmp_path, *EPOCHS)
    lightconv("--inputs", tmp_path, "--num-epoch-checkpoints", 4, "--output", output)
    assert "4/4" in capsys.readouterr().err
