"""Commands that are refused: one line, status 2, nothing is written. (`prepare`: data/test_prepare_options.py.)"""

import pytest

from lightconv_plugin.cli.main import main
from tests import ROOT

WRONG = {
    "demo": [
        (f"{ROOT}/configs", "cannot tell the language pair"),
        ("--updates 11", "--updates must be at least 12, got 11"),
        ("--src en", "--src and --tgt need a folder of text"),
        ("--work=", "argument --work: must name a folder, got ''"),
    ],
    "prepare": [
        ("", "the first argument must be TASK, such as parallel: lightconv prepare --help lists them"),
        (
            "--data t parallel",
            "the first argument must be TASK, such as parallel, got --data: lightconv prepare --help",
        ),
    ],
    "train": [
        ("", "the following arguments are required: CONFIG"),
        ("demo/transformer task.data=/nowhere", "no folder /nowhere"),
        ("demo/dynamicconv --nodes 2", "--nodes 2 needs --node-rank and --rendezvous"),
        ("demo/dynamicconv --nodes 2 --node-rank 2 --rendezvous a:1", "--node-rank must be below --nodes 2, got 2"),
        ("demo/dynamicconv --rendezvous a:1", "--node-rank and --rendezvous need --nodes"),
        ("demo/dynamicconv --gpus 2", "there is no option --gpus: fairseq's are overrides, such as"),
    ],
    "evaluate": [
        ("/tmp", "the following arguments are required: CHECKPOINT"),
        (f"{ROOT} {ROOT}/setup.py --subset tast", "has no subset tast"),
    ],
    "reproduce": [
        ("", "CONFIG is missing"),
        ("x.yaml", "--seeds is missing"),
        ("smoke/dynamicconv --seeds 1 1", "--seeds must be different numbers from 0, got 1 1"),
        ("smoke/dynamicconv --seeds -1", "--seeds must be different numbers from 0, got -1"),
        (
            "smoke/dynamicconv --seeds 1",
            "smoke/dynamicconv is not a published configuration: --runs must name a folder",
        ),
        ("x.yaml --seeds 1 --runs=", "argument --runs: must name a folder, got ''"),
        ("x.yaml --seeds 1 --results=", "argument --results: must name a folder, got ''"),
        ("--table x.yaml", "--table takes no configuration"),
        ("--table --no-prepare", "--table takes no configuration, seeds, overrides or preparation"),
        ("--table --prepare-options=--icml17", "--table takes no configuration, seeds, overrides or preparation"),
        ("--smoke --seeds 1", "--smoke has its own configuration and seeds"),
        ("model.x=1 multi30k_en_de/dynamicconv --seeds 1 ~task", "model.x=1 ~task changes what is computed"),
    ],
}
CASES = [pytest.param(command, *case, id=f"{command} {case[0]}") for command in WRONG for case in WRONG[command]]


@pytest.mark.parametrize("command, arguments, message", CASES)
def test_wrong_arguments(command, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main([command, *arguments.split()])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
