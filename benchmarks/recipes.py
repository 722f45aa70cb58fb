"""Short real trainings of the four mixers of a folder of configs/, all at the same time, and their scores.

    python -m benchmarks.recipes --data DATA_BIN --device cuda --dtype bfloat16 --updates 1500 --json FILE

Each runs `scripts/train.sh` with its configuration and a learning rate schedule of `--updates`, then
`scripts/evaluate.sh` on the test set with beam 5. They show whether training works on this device and in this type: the
loss falls, checkpoints load, translations have a score. They share the device, so their speed says nothing about a
mixer; benchmarks.training measures that. A training that is not done after `--seconds` is stopped (fairseq then saves a
checkpoint) and scored in that state. The exit status is 1 if any training failed or did not learn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine, report
from benchmarks.machine import ROOT
from benchmarks.report import BenchmarkError
from lightconv_plugin.cgroups import cores
from lightconv_plugin.records.file import read_folder
from lightconv_plugin.records.trainings import Training, trainings

SYSTEMS = ("dynamicconv", "lightweightconv", "talkconv", "transformer")
_CONFIGS = ROOT / "configs"
_WARM_UP = 9  # the recipes' learning rates rise for a ninth of their updates
_POINTS = 20  # number of points of the training loss
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)(: .*)?$")
_TO_STOP = 15.0  # seconds that a terminated process has to end


def parser() -> argparse.ArgumentParser:
    result = report.parser("recipes", __doc__)
    result.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="data-bin of scripts/prepare.sh for the configurations"
    )
    result.add_argument(
        "--configs", default="multi30k_en_de", metavar="NAME", help="folder of configs/ (default: %(default)s)"
    )
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    result.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    result.add_argument("--updates", type=machine.positive, default=1500)
    result.add_argument(
        "--seconds", type=machine.positive, default=200, help="at most, for training and scoring together"
    )
    result.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    result.add_argument("--no-score", action="store_true", help="train only")
    result.add_argument("--threads", type=machine.positive, metavar="N", help="of each training (default: a share)")
    result.add_argument("--folder", type=Path, metavar="DIR", help="keep checkpoints and logs there")
    result.add_argument(
        "--json", type=machine.json_file, metavar="FILE", help="write everything that was measured to FILE"
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Train, score, print a table and write the JSON; BenchmarkError for wrong options and failed trainings."""
    options = parser().parse_args(arguments)
    share = options.threads or max(1, cores() // len(options.systems))
    device = machine.prepare(options)
    require_data_bin(options.data)
    if missing := [name for name in options.systems if not (_CONFIGS / options.configs / f"{name}.yaml").is_file()]:
        raise BenchmarkError(f"--configs: configs/{options.configs} has no {missing[0]}.yaml")
    description = machine.describe(device)
    # `timeout` ends a part by this signal; no child process may outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recipes.")))
        folder.mkdir(parents=True, exist_ok=True)
        runs = [Run(name, folder.resolve() / name, options, share) for name in options.systems]
        stack.callback(stop, runs)
        results = measure(runs, options)
    print(machine.headline(description))
    print(
        f"configs/{options.configs}, {options.dtype}, {options.updates} updates, {len(runs)} trainings at the same time"
    )
    print(_table(results))
    if options.json:
        content = {
            "benchmark": "recipes",
            "machine": description,
            "dtype": options.dtype,
            "data": str(options.data),
            "configs": options.configs,
            "updates": options.updates,
            "at_the_same_time": len(runs),
            "systems": results,
        }
        report.write_json(options.json, content)
    wrong = {name: result["status"] for name, result in results.items() if result["status"] not in ("ok", "stopped")}
    if wrong:
        raise BenchmarkError("; ".join(f"{name}: {status}" for name, status in wrong.items()))


class Run:
    """One system: its training, then its scoring, each a process in its own session.

    folder: where checkpoints and logs go. `process`: the current or last process.
    """

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, threads: int) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.environment = os.environ | {"LIGHTCONV_PYTHON": sys.executable, "OMP_NUM_THREADS": str(threads)}
        self.process: subprocess.Popen | None = None
        self.seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def train(self, seconds: float) -> None:
        """Start the training, which fairseq ends after at most `seconds` of updates."""
        self._start("train", training_command(self.name, self.folder, self.options, seconds))

    def score(self) -> None:
        self._start("score", scoring_command(self.folder, self.options))

    def _start(self, kind: str, command: list[str]) -> None:
        with open(self.folder / f"{kind}.out", "wb") as out, open(self.folder / f"{kind}.err", "wb") as messages:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=messages,
                env=self.environment,
                start_new_session=True,
            )

    def training(self) -> Training | None:
        """The training so far, according to its records."""
        known = trainings(read_folder(self.folder).records)
        return known[-1] if known else None

    def last_words(self, kind: str) -> str:
        """The last exception in the process's log or messages, otherwise the last message."""
        files = [self.folder / name for name in (f"{kind}.log", f"{kind}.err")]
        lines = [line for file in files if file.exists() for line in file.read_text("utf-8", "replace").splitlines()]
        said = [line.strip() for line in lines if line.strip()]
        named = [line for line in said if _EXCEPTION.match(line)]
        return (named or said or ["nothing was said"])[-1]


def training_command(name: str, folder: Path, options: argparse.Namespace, seconds: float) -> list[str]:
    """scripts/train.sh with the system's configuration and the overrides for a short training."""
    overrides = {
        "task.data": options.data.resolve(),
        "checkpoint.save_dir": folder,
        "checkpoint.save_interval_updates": 0,
        "optimization.max_update": options.updates,
        "optimization.stop_time_hours": seconds / 3600,
        "lr_scheduler.total_num_update": options.updates,
        "lr_scheduler.warmup_updates": max(1, options.updates // _WARM_UP),
        "common.bf16": str(options.dtype == "bfloat16").lower(),
        "common.cpu": str(options.device == "cpu").lower(),
        "common.log_format": "json",
        "common.log_interval": max(1, options.updates // _POINTS),
        "common.tensorboard_logdir": "null",
    }
    settings = [f"{key}={quoted(value)}" for key, value in overrides.items()]
    script = ROOT / "scripts" / "train.sh"
    configuration = _CONFIGS / options.configs / f"{name}.yaml"
    return [str(script), "--processes", "1", "--max-restarts", "0", str(configuration), *settings]


def require_data_bin(folder: Path) -> None:
    if not list(folder.glob("dict.*.txt")):
        raise BenchmarkError(f"--data: {folder} is not a data-bin folder: it has no dict.*.txt")


def with_overrides(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command line, and the overrides for trainings after its --."""
    arguments = sys.argv[1:] if arguments is None else arguments
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:at]), arguments[at + 1 :]


def quoted(value: object) -> str:
    """A path quoted for hydra's override grammar, whatever characters it has."""
    return "'" + str(value).replace("'", "\\'") + "'" if isinstance(value, Path) else str(value)


def scoring_command(folder: Path, options: argparse.Namespace) -> list[str]:
    script, checkpoint = ROOT / "scripts" / "evaluate.sh", folder / "checkpoint_last.pt"
    return [str(script), str(options.data.resolve()), str(checkpoint), "--json", *["--cpu"] * (options.device == "cpu")]


def measure(runs: list[Run], options: argparse.Namespace) -> dict[str, dict]:
    """Train all, then score all that have a checkpoint; returns the results by system."""
    start = time.monotonic()
    # Two thirds of the time are for updates; start-up, the last validation, the checkpoint and scoring need the rest.
    for run in runs:
        run.train(options.seconds * 2 / 3)
    _wait(runs, start, options.seconds)
    results = {run.name: _result(run, options) for run in runs}
    if options.no_score:
        return results
    trained = [run for run in runs if (run.folder / "checkpoint_last.pt").exists() and run.process.returncode == 0]
    if options.seconds - (time.monotonic() - start) < 1:
        return results
    for run in trained:
        run.score()
    _wait(trained, start, options.seconds)
    for run in trained:
        results[run.name] |= _score(run)
    return results


def _wait(runs: list[Run], start: float, seconds: float) -> None:
    """Wait until all have ended; end the remaining ones when the time is over."""
    begin = time.monotonic()
    while any(run.process.poll() is None for run in runs) and time.monotonic() - start < seconds:
        for run in runs:
            if run.process.poll() is None:
                run.seconds = time.monotonic() - begin
        time.sleep(0.1)
    stop(runs)


def stop(runs: list[Run]) -> None:
    """End those that still run, with SIGTERM first, so that train.sh can end its own processes."""
    alive = [run.process for run in runs if run.process is not None and run.process.poll() is None]
    for process in alive:
        os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + _TO_STOP
    for process in alive:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(run: Run, options: argparse.Namespace) -> dict:
    training = run.training()
    train = [] if training is None else training.train
    losses = [(record.update, record.values["loss"]) for record in train if "loss" in record.values]
    valid = [] if training is None else training.part("valid")
    result = {
        "status": "ok",
        "updates": 0 if training is None else training.updates,
        "seconds": round(run.seconds, 1),
        "parameters": None if training is None else training.parameters,
        "loss": losses,
        "valid_loss": [(record.update, record.values["loss"]) for record in valid if "loss" in record.values],
    }
    if run.process.returncode:
        word = "out of time" if run.process.returncode in (143, -signal.SIGTERM, -signal.SIGKILL) else "training failed"
        result["status"] = f"{word} ({run.process.returncode}): {run.last_words('train')}"
    elif len(losses) < 2 or not math.isfinite(losses[-1][1]) or losses[-1][1] >= losses[0][1]:
        ends = [loss for _, loss in (losses[:1] + losses[1:][-1:])]
        result["status"] = f"did not learn: training loss {' → '.join(f'{loss:.3f}' for loss in ends) or 'unknown'}"
    elif result["updates"] < options.updates:
        result["status"] = "stopped"
    return result


def _score(run: Run) -> dict:
    if run.process.returncode:
        return {"status": f"scoring failed ({run.process.returncode}): {run.last_words('score')}"}
    lines = (run.folder / "score.out").read_text(encoding="utf-8").splitlines()
    try:
        return {"score": json.loads(lines[-1])}
    except (IndexError, json.JSONDecodeError):
        return {"status": f"scoring failed: it printed no JSON: {run.last_words('score')}"}


def _table(results: dict[str, dict]) -> str:
    rows = []
    for name, result in results.items():
        ends = [
            values[end][1] if values else None for values in (result["loss"], result["valid_loss"]) for end in (0, -1)
        ]
        bleu = result.get("score", {}).get("sacrebleu")
        rows.append([name, result["status"], result["updates"], *map(report.digits, ends), report.digits(bleu)])
    headers = ["system", "", "updates", "loss, first", "last", "valid loss, first", "last", "sacreBLEU"]
    return report.table(headers, rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
