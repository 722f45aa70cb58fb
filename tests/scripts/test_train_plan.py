"""The batch divided over processes, paths made absolute, and checkpoints that a kill cut short."""

import zipfile

import pytest
import yaml
from train_plan import divide_batch, mend, plan, quote

from tests.scripts.conftest import ROOT


@pytest.mark.parametrize(
    "tokens, max_tokens, processes, expected",
    [
        (4096, 4096, 1, (4096, 1)),
        (4096, 4096, 2, (2048, 1)),
        (8 * 16 * 3584, 3584, 8, (3584, 16)),
        (8 * 16 * 3584, 3584, 1, (3584, 128)),
        (4096, 1024, 1, (1024, 4)),
        (4096, 3000, 1, (2048, 2)),
        (4096, 4096, 3, (1365, 1)),
    ],
    ids=["as-it-is", "two-gpus", "paper", "paper-on-one", "small-memory", "uneven", "rounded"],
)
def test_the_tokens_an_update_stay(tokens, max_tokens, processes, expected):
    each, update_freq = divide_batch(tokens, max_tokens, processes)
    assert (each, update_freq) == expected
    assert each <= max_tokens
    assert 0 <= tokens - processes * each * update_freq < processes * update_freq


@pytest.fixture
def config(tmp_path):
    (tmp_path / "root/data").mkdir(parents=True)
    return {
        "task": {"data": "data"},
        "checkpoint": {"save_dir": "runs/x"},
        "dataset": {"max_tokens": 4096},
        "optimization": {"update_freq": [2]},
    }


def test_paths_of_a_configuration_are_below_the_checkout(config, tmp_path):
    save_dir, overrides = plan(config, [], 1, tmp_path / "root", tmp_path)
    assert save_dir == tmp_path / "root/runs/x"
    assert overrides == [
        f"task.data='{tmp_path}/root/data'",
        f"checkpoint.save_dir='{tmp_path}/root/runs/x'",
        "dataset.max_tokens=4096",
        "optimization.update_freq=[2]",
    ]


def test_paths_of_an_override_are_below_the_working_directory(config, tmp_path):
    (tmp_path / "my data").mkdir()
    given = ["task.data=my data", "checkpoint.save_dir='out'", "common.seed=3"]
    save_dir, overrides = plan(config, given, 1, tmp_path / "root", tmp_path)
    assert save_dir == tmp_path / "out"
    assert overrides[:2] == ["common.seed=3", f"task.data='{tmp_path}/my data'"]


@pytest.mark.parametrize(
    "given, batch",
    [
        (["dataset.max_tokens=1024"], ["dataset.max_tokens=1024", "optimization.update_freq=[4]"]),
        (["optimization.update_freq=[5]"], ["optimization.update_freq=[5]"]),
        ([], ["dataset.max_tokens=4096", "optimization.update_freq=[1]"]),
    ],
    ids=["less-memory", "said", "derived"],
)
def test_two_gpus(config, tmp_path, given, batch):
    _, overrides = plan(config, given, 2, tmp_path / "root", tmp_path)
    assert [item for item in overrides if item.startswith(("dataset", "optimization"))] == batch


def test_missing_data_and_settings_are_named(config, tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere with binarised data"):
        plan(config, ["task.data=nowhere"], 1, tmp_path, tmp_path)
    del config["checkpoint"]
    with pytest.raises(ValueError, match=r"no checkpoint\.save_dir: add it"):
        plan(config, [], 1, tmp_path / "root", tmp_path)


@pytest.mark.parametrize("text", ["/plain", "/with space", "/a'b", "/a,b=c", "/ends\\", "/{x}[y]:z", "/ümlaut"])
def test_hydra_reads_a_quoted_path_as_it_is(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"task.data={quote(text)}").value() == text


def test_a_checkpoint_cut_short_is_replaced_by_the_newest_whole_one(tmp_path, capsys):
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data", name * 50)
    whole = (tmp_path / "checkpoint_last.pt").read_bytes()
    mend(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == whole

    (tmp_path / "checkpoint_last.pt").write_bytes(whole[:100])
    mend(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == (tmp_path / "checkpoint2.pt").read_bytes()
    assert "was cut short: going on from checkpoint2.pt" in capsys.readouterr().err

    for path in tmp_path.glob("checkpoint*.pt"):
        path.write_bytes(b"PK cut")
    mend(tmp_path)
    assert not (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_configuration_says_its_tokens_and_where_things_go(path, tmp_path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key in ("task", "checkpoint", "dataset", "optimization", "model", "criterion", "optimizer", "lr_scheduler"):
        assert key in config, key
    (tmp_path / config["task"]["data"]).mkdir(parents=True)
    save_dir, _ = plan(config, [], 1, tmp_path, tmp_path)
    assert save_dir.name == path.stem
    assert f"{config['dataset']['max_tokens']} × {config['optimization']['update_freq'][0]}" in path.read_text()
