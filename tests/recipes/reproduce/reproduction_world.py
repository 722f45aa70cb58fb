"""A task to reproduce, and programs in the place of preparing, training, tuning and scoring that only write down that
they were called."""

import pytest
import yaml

from lightconv_plugin.recipes.reproduce import run as reproduce
from lightconv_plugin.recipes.reproduce.job import parse, plan
from lightconv_plugin.recipes.reproduce.state import State

PROTOCOL = {
    "prepare": "scripts/prepare_x.sh --bpe 100",
    "metric": "bleu",
    "generate": ["--beam", 5],
    "score": ["--compound-split"],
    "tune": {"average": [1, 5], "lenpen": [0.6, 1], "by": "bleu_tok"},
    "measure": "tokenised BLEU",
    "test": "newstest",
    "paper": "IWSLT14 De-En",
    "title": "A task",
    "note": "The systems differ in the mixer alone.",
    "systems": {"talkconv": {"generate": ["--beam", "4"]}},
}
CONFIG = {
    "model": {"dropout": 0.3},
    "task": {"data": "data/x/data-bin", "target_lang": "de"},
    "dataset": {"max_tokens": 4000},
    "optimization": {"lr": [0.0005], "update_freq": [2], "max_update": 100},
    "checkpoint": {"save_dir": "runs/x/y"},
}


def task(folder, configs=("dynamicconv", "talkconv"), **changes):
    """A task's folder with these configurations; a key changed to `...` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (PROTOCOL | changes).items() if value is not ...}
    (folder / "protocol.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    for system in configs:
        (folder / f"{system}.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return folder


PREPARE = """\
echo prepare "$@" >>"$CALLS"
while [[ $# -gt 1 ]]; do case $1 in --out) out=$2 ;; esac; shift; done
mkdir -p "$out/data-bin"
for name in dict.de.txt train.en-de.de.idx train.en-de.de.bin valid.en-de.de.bin test.en-de.de.bin; do
    [[ -f $out/data-bin/$name ]] || echo "$name" >"$out/data-bin/$name"
done
"""
# Ends early after the updates in $UPDATES, as if it were killed.
TRAIN = """\
echo train "$@" >>"$CALLS"
for item in "${@:2}"; do case $item in checkpoint.save_dir=*) dir=${item#*=} ;; esac; done
mkdir -p "$dir"
echo "checkpoints and log: $dir (2 × 3 threads)" >&2
echo "[fairseq_cli.train][INFO] - {" >>"$dir/train.log"
if [[ -n ${PAUSE:-} ]]; then sleep "$PAUSE"; fi
for updates in 50 ${UPDATES:-100}; do
    cp "$TEMPLATES/$updates.pt" "$dir/checkpoint_1_$updates.pt"
    cp "$TEMPLATES/$updates.pt" "$dir/checkpoint_last.pt"
done
if [[ -n ${FAIL:-} ]]; then echo "the reason" >&2; exit 3; fi
"""
SCORE = """\
echo score "$@" >>"$CALLS"
if [[ -n ${FAIL_SCORE:-} ]]; then echo "the reason" >&2; exit 4; fi
echo '{"bleu_tok": 30.5, "sacrebleu": 29.5, "chrf": 55.0, "signature": "s", "chrf_signature": "c", "parameters": 7}'
"""
TUNE = """\
echo tune "$@" >>"$CALLS"
echo "tuning: 1/1" >&2
while [[ $# -gt 1 ]]; do case $1 in --output) out=$2 ;; esac; [[ $1 == -- ]] && break; shift; done
dir=$(dirname "$out")
[[ -f $dir/average5.pt ]] || { echo mean >"$dir/mean.tmp" && mv "$dir/mean.tmp" "$dir/average5.pt"; }
printf '{"average": 5, "lenpen": 0.6, "score": 31.5, "checkpoint": "%s", "tried": []}\n' "$dir/average5.pt" >"$out"
"""


def write_templates(folder):
    """Checkpoints as fairseq-hydra-train writes them, of 50 and 100 updates, and one with another dropout."""
    torch = pytest.importorskip("torch")
    cfg = {**CONFIG, "common": {"seed": 1}, "distributed_training": {"distributed_world_size": 2}}
    # What train.sh makes of 4000 × 2 tokens for two processes.
    cfg |= {"dataset": {"max_tokens": 4000}, "optimization": CONFIG["optimization"] | {"update_freq": [1]}}
    for name, updates, dropout in (("50", 50, 0.3), ("100", 100, 0.3), ("other", 100, 0.2)):
        state = {"cfg": cfg | {"model": {"dropout": dropout}}, "optimizer_history": [{"num_updates": updates}]}
        torch.save(state, folder / f"{name}.pt")
    return folder


def write_programs(folder):
    """The programs above, in a folder of their own."""
    folder.mkdir()
    for name, text in (("prepare.sh", PREPARE), ("train.sh", TRAIN), ("score.sh", SCORE), ("tune.sh", TUNE)):
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{text}")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return write_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def world(tmp_path, monkeypatch, templates):
    """A task whose programs are those above; `world.row(*arguments)` reproduces, `world.calls()` what was called."""
    scripts = write_programs(tmp_path / "scripts")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TEMPLATES", str(templates))
    monkeypatch.setattr(reproduce, "SCRIPTS", scripts)
    monkeypatch.setattr(reproduce, "TOOLS", (str(scripts / "tune.sh"),))
    return World(tmp_path)


class World:
    def __init__(self, path):
        self.path = path
        self.folder = task(path / "configs/task", prepare=str(path / "scripts/prepare.sh"))
        self.config = self.folder / "dynamicconv.yaml"
        self.runs = path / "runs/task/dynamicconv"

    def job(self, *arguments, seeds=(1, 2)):
        data = f"task.data={self.path}/data/data-bin"
        arguments = [self.config, "--seeds", *seeds, "--runs", self.path / "runs", data, *arguments]
        return plan(parse([str(part) for part in arguments]))

    def row(self, *arguments, seeds=(1, 2)):
        job = self.job(*arguments, seeds=seeds)
        with State(job.folder) as state:
            return reproduce.Reproduction(job, state).row()

    def calls(self):
        """The programs called since this was last asked, and all of their arguments as text."""
        path = self.path / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split()[0] for line in lines], "\n".join(lines)
