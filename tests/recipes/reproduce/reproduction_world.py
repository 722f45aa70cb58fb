"""A task to reproduce, and stand-ins for preparing, training, tuning and scoring that only write down their calls."""

import os
import time
from pathlib import Path

import pytest
import yaml

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import write_text
from lightconv_plugin.recipes.reproduce import run as reproduce
from lightconv_plugin.recipes.reproduce.job import plan
from lightconv_plugin.recipes.steps import Steps
from lightconv_plugin.recipes.training import child
from lightconv_plugin.scoring.measuring import Scored

PROTOCOL = {
    "prepare": "x --bpe 100",
    "metric": "bleu",
    "generate": ["--beam", 5],
    "score": {"compound_split": True},
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
    "task": {"data": "data/x/data-bin", "source_lang": "en", "target_lang": "de"},
    "dataset": {"max_tokens": 4000},
    "optimization": {"lr": [0.0005], "update_freq": [2], "max_update": 100},
    "checkpoint": {"save_dir": "runs/x/y"},
}


def task(folder, configs=("dynamicconv", "talkconv"), **changes):
    """A task's folder with these configurations; a key changed to `...` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (PROTOCOL | changes).items() if value is not ...}
    (folder / "protocol.yaml").write_text(
        yaml.safe_dump(content, allow_unicode=True, sort_keys=False), encoding="utf-8"
    )
    for system in configs:
        (folder / f"{system}.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return folder


def edit(path, **changes):
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text("# another comment\n" + yaml.safe_dump(content))


# Waits while there is a file $HOLD, though not for ever; ends early after the updates in $UPDATES, as if killed.
TRAIN = """\
#!/usr/bin/env bash
set -euo pipefail
echo train "$@" >>"$CALLS"
for item in "${@:2}"; do case $item in checkpoint.save_dir=*) dir=${item#*=} ;; esac; done
mkdir -p "$dir"
echo "checkpoints and log: $dir (2 × 3 threads)" >&2
touch "$dir/train.log"
echo '{"record": "start", "update": 0, "processes": 2, "threads": 3}' >>"$dir/records.jsonl"
for ((i = 0; i < 6000; i++)); do [[ -e ${HOLD:-} ]] || break; sleep 0.05; done
for updates in 50 ${UPDATES:-100}; do
    sleep "${MOMENT:-0}"
    cp "$TEMPLATES/$updates.pt" "$dir/checkpoint_1_$updates.pt"
    cp "$TEMPLATES/$updates.pt" "$dir/checkpoint_last.pt"
done
if [[ -n ${FAIL:-} ]]; then echo "the reason" >&2; exit 3; fi
"""
SCORES = {"bleu_tok": 30.5, "sacrebleu": 29.5, "chrf": 55.0, "signature": "s", "chrf_signature": "c", "parameters": 7}
SCORES["search"] = "the plugin's own search"


def called(*words):
    with open(os.environ["CALLS"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")
    time.sleep(float(os.environ.get("MOMENT", 0)))


def prepare(name, arguments):
    called("prepare", name, *arguments)
    data = Path(arguments[arguments.index("--out") + 1]) / "data-bin"
    data.mkdir(parents=True, exist_ok=True)
    parts = (f"{part}.en-de.de.{kind}" for part in ("train", "valid", "test") for kind in ("bin", "idx"))
    for name in ("dict.de.txt", *parts):
        if not (data / name).exists():
            write_text(data / name, f"{name}\n")


def tune(data, save_dir, **options):
    called("tune", data, save_dir, options)
    if not (save_dir / "average5.pt").exists():
        write_text(save_dir / "average5.pt", "mean\n")
    lenpen = next(iter(options["lenpen"]), None)
    return {"average": 5, "lenpen": lenpen, "score": 31.5, "checkpoint": str(save_dir / "average5.pt"), "tried": []}


def evaluate(data, checkpoint, *, options, how):
    called("score", data, checkpoint, options, how)
    if os.environ.get("FAIL_SCORE"):
        raise InputError("the reason")
    return Scored(SCORES, "")


def measure(data, checkpoint, subset, window, options):
    called("perplexity", data, checkpoint, subset, window, options)
    return {"perplexity": 25.5, "loss": 4.7, "parameters": 7}


def stand_ins(train):
    """(module, name, stand-in) of everything that computes; `train` is the program that `write_program` wrote."""
    return [
        (reproduce, "prepare", prepare),
        (reproduce, "check_search", lambda *_, **__: None),  # asks fairseq, as the next one
        (reproduce, "check_eval_lm", lambda *_: None),
        (child, "module_command", lambda name: [str(train)]),
        (reproduce, "tune", tune),
        (reproduce, "evaluate", evaluate),
        (reproduce, "measure_perplexity", measure),
    ]


def write_templates(folder):
    """Checkpoints as fairseq-hydra-train writes them, of 50 and 100 updates, and with another dropout and of a seed."""
    torch = pytest.importorskip("torch")
    cfg = {**CONFIG, "distributed_training": {"distributed_world_size": 2}}
    # What train.sh makes of 4000 × 2 tokens for two processes.
    cfg |= {"dataset": {"max_tokens": 4000}, "optimization": CONFIG["optimization"] | {"update_freq": [1]}}
    changes = {"other": {"model": {"dropout": 0.2}}, "seed1": {"common": {"seed": 1}}}
    for name, updates in (("50", 50), ("100", 100), ("other", 100), ("seed1", 100)):
        state = {"cfg": cfg | changes.get(name, {}), "optimizer_history": [{"num_updates": updates}]}
        torch.save(state, folder / f"{name}.pt")
    return folder


def write_program(path):
    """The program that trains."""
    path.write_text(TRAIN)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return write_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def world(tmp_path, monkeypatch, templates):
    """A task computed by the stand-ins; `world.row(*arguments)` reproduces, `world.calls()` says what was called."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TEMPLATES", str(templates))
    for place, name, instead in stand_ins(write_program(tmp_path / "train.sh")):
        monkeypatch.setattr(place, name, instead)
    return World(tmp_path)


class World:
    def __init__(self, path):
        self.path = path
        self.folder = task(path / "configs/task")
        self.config = self.folder / "dynamicconv.yaml"
        self.runs = path / "runs/task/dynamicconv"

    def job(self, *overrides, seeds=(1, 2), prepare=True):
        data = f"task.data={self.path}/data/data-bin"
        return plan(self.config, seeds, overrides=[data, *overrides], runs=self.path / "runs", prepare=prepare)

    def row(self, *overrides, seeds=(1, 2), prepare=True):
        job = self.job(*overrides, seeds=seeds, prepare=prepare)
        with Steps(job.folder) as steps:
            return reproduce.Reproduction(job, steps).row()

    def calls(self):
        """The stand-ins called since this was last asked, and all of their arguments as text."""
        path = self.path / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split()[0] for line in lines], "\n".join(lines)
