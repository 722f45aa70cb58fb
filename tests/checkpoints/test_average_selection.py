"""Which checkpoints of a folder `lightconv average` takes."""

from argparse import Namespace

import pytest
import torch

from lightconv_plugin.checkpoints import averaging
from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.checkpoints.fairseq_files import EPOCHS, OTHERS, lightconv, make, refused, save

UPDATES = ["checkpoint_1_500.pt", "checkpoint_1_1000.pt", "checkpoint_2_1500.pt", "checkpoint_2_20000.pt"]


@pytest.mark.parametrize(
    "options, taken",
    [
        (["--num-epoch-checkpoints", 1], [3]),
        (["--num-epoch-checkpoints", 3], [3, 2, 1]),
        (["--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 3], [2, 1]),
        (["--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 9], [2, 1]),
        (["--num-epoch-checkpoints", 4, "--checkpoint-upper-bound", 10], [3, 2, 1, 0]),
        (["--num-update-checkpoints", 1], [7]),
        (["--num-update-checkpoints", 4], [7, 6, 5, 4]),
        (["--num-update-checkpoints", 2, "--checkpoint-upper-bound", 1500], [6, 5]),
        (["--num-update-checkpoints", 2, "--checkpoint-upper-bound", 1499], [5, 4]),
    ],
    ids=lambda value: "-".join(map(str, value)).replace("--", ""),
)
def test_last_checkpoints(options, taken, tmp_path, output, capsys):
    make(tmp_path, *EPOCHS, *UPDATES, *OTHERS)
    assert lightconv("--inputs", tmp_path, *options, "--output", output) == 0
    got = torch.load(output)
    assert got["averaged_from"] == [(EPOCHS + UPDATES)[i] for i in taken]
    assert got["model"]["w"][0].item() == pytest.approx(sum(10.0**i for i in taken) / len(taken))
    out = capsys.readouterr().out
    assert str(output) in out
    assert all((EPOCHS + UPDATES)[i] in out for i in taken)


def test_selection_among_given_files(tmp_path, output):
    make(tmp_path, *EPOCHS)
    lightconv("--inputs", *(tmp_path / name for name in EPOCHS[:3]), "--num-epoch-checkpoints", 2, "--output", output)
    assert torch.load(output)["averaged_from"] == ["checkpoint3.pt", "checkpoint2.pt"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--num-epoch-checkpoints", 5], "need 5 checkpoints named checkpointEPOCH.pt, found 4: "),
        (
            ["--num-epoch-checkpoints", 3, "--checkpoint-upper-bound", 2],
            "up to 2, found 2: checkpoint2.pt, checkpoint1.pt; without the bound: 4: ",
        ),
        (["--num-update-checkpoints", 1], "need 1 checkpoints named checkpoint_EPOCH_UPDATE.pt, found 0"),
        (["--num-best-checkpoints", 1], "found 0 (fairseq-train writes them with --keep-best-checkpoints)"),
        ([], "is a folder: choose"),
        (["--checkpoint-upper-bound", 3], "--checkpoint-upper-bound needs"),
        (["--num-best-checkpoints", 1, "--checkpoint-upper-bound", 3], "--checkpoint-upper-bound needs"),
        (["--num-epoch-checkpoints", 1, "--maximize-best-checkpoint-metric"], "needs --num-best-checkpoints"),
        (["--num-epoch-checkpoints", 1, "--no-maximize-best-checkpoint-metric"], "needs --num-best-checkpoints"),
    ],
    ids=lambda value: "-".join(map(str, value)).replace("--", "") if isinstance(value, list) else "",
)
def test_selection_that_cannot_be_made(options, said, tmp_path, output, capsys):
    make(tmp_path, *EPOCHS)
    assert said in refused(capsys, "--inputs", tmp_path, *options, "--output", output)
    assert not output.exists()


def test_one_way_of_choosing_at_a_time(tmp_path, output, capsys):
    with pytest.raises(SystemExit):
        lightconv("--inputs", tmp_path, "--num-epoch-checkpoints=1", "--num-best-checkpoints=1", "--output", output)
    assert "not allowed with" in capsys.readouterr().err


LOSSES = ["checkpoint.best_loss_4.1230.pt", "checkpoint.best_loss_4.0.pt", "checkpoint.best_loss_12.5001.pt"]
BLEUS = ["checkpoint.best_bleu_9.5000.pt", "checkpoint.best_bleu_34.2104.pt", "checkpoint.best_bleu_34.2102.pt"]
ODD = ["checkpoint.best_my_score_-1.5.pt", "checkpoint.best_my_score_2.0.pt"]


@pytest.mark.parametrize(
    "names, options, taken",
    [
        (LOSSES, [], [1, 0]),
        (BLEUS, [], [1, 2]),
        (LOSSES, ["--maximize-best-checkpoint-metric"], [2, 0]),
        (BLEUS, ["--no-maximize-best-checkpoint-metric"], [0, 2]),
        (ODD, ["--maximize-best-checkpoint-metric"], [1, 0]),
        (ODD, ["--no-maximize-best-checkpoint-metric"], [0, 1]),
    ],
    ids=["loss", "bleu", "loss-maximised", "bleu-minimised", "other-maximised", "other-minimised"],
)
def test_best_checkpoints(names, options, taken, tmp_path, output):
    make(tmp_path, *names, *OTHERS)
    assert lightconv("--inputs", tmp_path, "--num-best-checkpoints", 2, *options, "--output", output) == 0
    assert torch.load(output)["averaged_from"] == [names[i] for i in taken]


@pytest.mark.parametrize("where", ["cfg", "args"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimised", "maximised"])
def test_the_checkpoint_says_which_way_is_better(maximize, where, tmp_path, output):
    settings = {"best_checkpoint_metric": "my_score", "maximize_best_checkpoint_metric": maximize}
    extra = {"cfg": {"checkpoint": settings}} if where == "cfg" else {"cfg": None, "args": Namespace(**settings)}
    for name in ODD:
        save(tmp_path / name, {"w": torch.ones(1)}, **extra)
    lightconv("--inputs", tmp_path, "--num-best-checkpoints", 1, "--output", output)
    assert safe_torch_load(output)["averaged_from"] == [ODD[int(maximize)]]


def test_best_is_the_order_in_which_fairseq_keeps_checkpoints(tmp_path):
    """Among equal values too (fairseq breaks ties by name)."""
    checkpoint_utils = pytest.importorskip("fairseq.checkpoint_utils")
    names = [f"checkpoint.best_loss_{value}.pt" for value in ("3.50", "3.5", "3.500", "2.9991", "10.0")]
    make(tmp_path, *names)
    kept = checkpoint_utils.checkpoint_paths(str(tmp_path), pattern=r"checkpoint\.best_loss_(\d+\.?\d*)\.pt")
    files = averaging.candidates([tmp_path])
    assert list(map(str, averaging.best_checkpoints(files, 5, maximize=True))) == kept
    assert list(map(str, averaging.best_checkpoints(files, 5, maximize=False))) == kept[::-1]


@pytest.mark.parametrize(
    "names, number, said",
    [
        (ODD, 1, "does not say whether a higher my_score is better"),
        (LOSSES, 4, "need 4 checkpoints named checkpoint.best_METRIC_VALUE.pt, found 3: "),
        (LOSSES + BLEUS, 1, "best checkpoints by 2 metrics (bleu, loss)"),
    ],
    ids=["unknown-direction", "too-few", "two-metrics"],
)
def test_best_that_cannot_be_told(names, number, said, tmp_path, output, capsys):
    make(tmp_path, *names)
    assert said in refused(capsys, "--inputs", tmp_path, "--num-best-checkpoints", number, "--output", output)


@pytest.mark.parametrize("left", [b"", b"P", bytes(700)], ids=["empty", "one byte", "zeros"])
def test_checkpoints_that_were_cut_short_give_way_to_the_ones_before(left, tmp_path, capsys):
    make(tmp_path, *EPOCHS)
    whole = (tmp_path / "checkpoint10.pt").read_bytes()
    for name, content in (("checkpoint10.pt", whole[:700]), ("checkpoint3.pt", left)):
        (tmp_path / name).write_bytes(content)
    assert lightconv("--inputs", tmp_path, "--num-last-checkpoints", 2, "--output", tmp_path / "mean.pt") == 0
    said = capsys.readouterr().err
    for name in ("checkpoint10.pt", "checkpoint3.pt"):
        assert f"{tmp_path / name} is incomplete: skipped" in said
    mean = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert mean["averaged_from"] == ["checkpoint2.pt", "checkpoint1.pt"]
    assert "3 checkpoints named" in refused(
        capsys, "--inputs", tmp_path, "--num-last-checkpoints", 3, "--output", tmp_path / "m3.pt"
    )
