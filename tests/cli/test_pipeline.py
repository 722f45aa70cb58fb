"""Train, average, generate, score: the tools on what fairseq itself writes."""

import json
import re

import pytest
import torch

from lightconv_plugin.cli import main

pytest.importorskip("fairseq")

from tests.fairseq_cli import USER_DIR, run


@pytest.mark.parametrize(
    "options, pattern, taken",
    [
        (["--num-epoch-checkpoints=3"], r"checkpoint(\d+)\.pt", slice(-1, -4, -1)),
        (["--num-epoch-checkpoints=2", "--checkpoint-upper-bound=3"], r"checkpoint(\d+)\.pt", slice(-2, -4, -1)),
        (["--num-update-checkpoints=2"], r"checkpoint_\d+_(\d+)\.pt", slice(-1, -3, -1)),
        (["--num-best-checkpoints=2"], r"checkpoint\.best_loss_(.+)\.pt", slice(0, 2)),
    ],
    ids=["epochs", "bounded", "updates", "best"],
)
def test_average_of_what_fairseq_saves(options, pattern, taken, toy_training, tmp_path):
    output = tmp_path / "average.pt"
    assert main.main(["average", "--inputs", str(toy_training), *options, "--output", str(output)]) == 0
    got = torch.load(output, weights_only=False)
    available = sorted(float(m[1]) for path in toy_training.iterdir() if (m := re.fullmatch(pattern, path.name)))
    assert [float(re.fullmatch(pattern, name)[1]) for name in got["averaged_from"]] == available[taken]
    assert len(available) >= 3
    models = [torch.load(toy_training / name, weights_only=False)["model"] for name in got["averaged_from"]]
    assert list(got["model"]) == list(models[0])
    for key, value in got["model"].items():
        mean = torch.stack([model[key].double() for model in models]).mean(dim=0)
        torch.testing.assert_close(value.double(), mean, atol=1e-7, rtol=1e-6)


def test_generate_reads_an_average_and_score_agrees_with_it(toy_data, toy_training, tmp_path, capsys, refusal):
    average = tmp_path / "average.pt"
    command = ["average", "--inputs", str(toy_training), "--num-epoch-checkpoints", "3", "--output", str(average)]
    assert main.main(command) == 0
    assert average.stat().st_size < (toy_training / "checkpoint_last.pt").stat().st_size / 2
    capsys.readouterr()

    log = run(
        "generate", toy_data, "--user-dir", USER_DIR, "--path", average, "--beam", 2, "--cpu", "--max-len-b", 8,
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    (tmp_path / "gen.out").write_text(log, encoding="utf-8")
    assert main.main(["score", "--gen", str(tmp_path / "gen.out"), "--lang", "en"]) == 0
    said = capsys.readouterr().out
    last = re.search(r"^Generate test with beam=2: (BLEU4 = .*)$", log, re.M)
    assert said.split("  tokenised, 12 sentences\n")[0] == last[1]
    assert main.main(["score", "--gen", str(tmp_path / "gen.out"), "--detok", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 12

    lines = log.splitlines(keepends=True)
    (tmp_path / "gen.out").write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    assert "is cut off" in refusal("score", "--gen", tmp_path / "gen.out", "--lang", "en")
