"""The demonstration behind scripts/demo.sh: prepares a corpus, trains two systems, scores them, writes the report."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo_report import Result, read_log, write_report
from demo_training import Training, TrainingFailed, run_together
from parallel_folder import CorpusError, find_corpus
from steps import digest, say, write_text

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
SYSTEMS = ("dynamicconv", "transformer")


class DemoError(Exception):
    """Something the user can mend; shown as one line."""


@dataclass(frozen=True)
class Task:
    """What is translated, and the settings that follow from it."""

    raw: Path | None  # None: the grammar's corpus
    configs: Path
    epochs: int
    average: int
    merges: int


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh", description="Train DynamicConv and a Transformer, compare their BLEU."
    )
    parser.add_argument("raw", nargs="?", type=Path, metavar="DIR", help="folder of parallel text")
    parser.add_argument("--epochs", type=int, metavar="N", help="default: 6 for the grammar's corpus, 20 for a folder")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the grammar and of the training")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where everything goes (default: runs/demo/NAME)")
    parser.add_argument("--src", metavar="XX", help="source language, if the file names do not tell")
    parser.add_argument("--tgt", metavar="YY", help="target language")
    args = parser.parse_args(argv)
    if args.epochs is not None and args.epochs < 1:
        parser.error(f"--epochs must be positive, got {args.epochs}")
    if args.raw is None and (args.src or args.tgt):
        parser.error("--src and --tgt go with a folder of text; the grammar's corpus is English–German")
    return args


def task_of(args: argparse.Namespace) -> Task:
    if args.raw is None:
        epochs = args.epochs or 6
        return Task(None, ROOT / "configs/demo", epochs, min(2, epochs), merges=2000)
    epochs = args.epochs or 20
    return Task(args.raw.resolve(), ROOT / "configs/multi30k_en_de", epochs, min(5, epochs), merges=10000)


def run(*command: str | Path) -> None:
    """A command whose messages go to the terminal; its own error message is enough when it fails."""
    if subprocess.run([str(part) for part in command], check=False).returncode != 0:
        raise DemoError(f"{Path(command[1]).name} failed")


def prepare(args: argparse.Namespace, task: Task, work: Path) -> tuple[Path, str, str]:
    """The corpus as fairseq's binary data: (folder of data-bin and the text, source language, target language)."""
    raw, data = task.raw, work / "data"
    if raw is None:
        raw = work / "text"
        run(sys.executable, SCRIPTS / "grammar_corpus.py", "--out", raw, "--seed", str(args.seed))
    corpus = find_corpus(raw, args.src, args.tgt)
    run(
        *(sys.executable, SCRIPTS / "prepare_text.py", "--raw", raw, "--out", data, "--bpe", str(task.merges)),
        *("--src", corpus.src, "--tgt", corpus.tgt, "--train-prefix", corpus.train),
        *("--valid-prefix", corpus.valid, "--test-prefix", ",".join(corpus.tests)),
    )
    return data, corpus.src, corpus.tgt


def claim(folder: Path, key: str) -> None:
    """Make `folder` that of the training known by `key`: one with the same key goes on, one with another is removed."""
    marker = folder / "demo.key"
    if folder.exists() and not (marker.is_file() and marker.read_text() == key):
        if not marker.is_file():
            raise DemoError(f"{folder} is there already and is not from a demo: choose another --work")
        say(f"{folder.name}: the text or the settings changed, trained anew")
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    write_text(marker, key)


def threads_each(systems: int) -> tuple[int, bool]:
    """(threads of a training, whether all train at the same time).

    A model this small gains little from a second thread: on two cores, two trainings at once are done sooner than one
    after the other. On a GPU they would only share it.
    """
    import torch

    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available() or cores < systems:
        return int(os.environ.get("OMP_NUM_THREADS", cores)), False
    return int(os.environ.get("OMP_NUM_THREADS", cores // systems)), True


def train_and_score(
    args: argparse.Namespace, task: Task, work: Path, data: Path, langs: tuple[str, str]
) -> list[Result]:
    """Both systems, each trained, averaged and scored unless its result is there already."""
    threads, together = threads_each(len(SYSTEMS))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    corpus = digest(data / "data-bin")
    trainings = []
    for system in SYSTEMS:
        config = task.configs / f"{system}.yaml"
        known = f"{digest(config)} {corpus} {langs} {args.seed}"
        folder, key = work / system, hashlib.sha256(known.encode()).hexdigest()
        result = Result.read(folder / "result.json")
        if result and result.key == [key, task.epochs]:
            say(f"{system}: trained and scored before")
            continue
        claim(folder, key)
        (folder / "result.json").unlink(missing_ok=True)
        overrides = {
            "task.data": data / "data-bin",
            "task.source_lang": langs[0],
            "task.target_lang": langs[1],
            "checkpoint.save_dir": folder,
            "checkpoint.patience": -1,
            "optimization.max_epoch": task.epochs,
            "common.seed": args.seed,
        }
        command = [SCRIPTS / "train.sh", config, *(f"{name}={value}" for name, value in overrides.items())]
        trainings.append(Training(system, [str(part) for part in command], task.epochs, folder, [key, task.epochs]))
    for group in [trainings] if together else [[training] for training in trainings]:
        if group:
            how = f"at the same time, threads each: {threads}" if len(group) > 1 else f"threads: {threads}"
            say(f"training {' and '.join(t.name for t in group)}, epochs: {task.epochs} ({how})")
            run_together(group, environment)
    for training in trainings:
        score(training, task, data, langs, environment, threads, together)
    return [Result.read(work / system / "result.json") for system in SYSTEMS]


def score(
    training: Training, task: Task, data: Path, langs: tuple[str, str], environment: dict, threads: int, together: bool
) -> None:
    """Average the last checkpoints, translate and score the test set, and write the system's result.json."""
    folder = training.folder
    say(f"{training.name}: averaging the last {task.average} checkpoints, beam search on the test set")
    checkpoint = folder / f"average{task.average}.pt"
    for command in (
        [SCRIPTS / "average.sh", folder, str(task.average)],
        # A model that has not learnt to stop would otherwise write 200 tokens a sentence.
        [SCRIPTS / "score.sh", data / "data-bin", checkpoint, "--json", "--max-len-a", "2", "--max-len-b", "20"],
    ):
        with (folder / "score.log").open("a") as log:
            done = subprocess.run(
                [str(part) for part in command], env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode != 0:
            tail = "\n".join((folder / "score.log").read_text(errors="replace").splitlines()[-5:])
            raise DemoError(
                f"{Path(command[0]).name} failed for {training.name}:\n{tail}\n(all of it: {folder}/score.log)"
            )
    log = read_log(folder / "train.log")
    Result(
        key=training.key,
        system=training.name,
        score=json.loads(checkpoint.with_suffix(".test.score").read_text()),
        parameters=log.parameters,
        tokens_per_second=log.tokens_per_second,
        seconds=log.seconds,
        epochs=task.epochs,
        averaged=task.average,
        threads=threads,
        together=together,
        generated=str(checkpoint.with_suffix(".test.gen")),
    ).write(folder / "result.json")


def main() -> int:
    args = parse()
    start = time.monotonic()
    task = task_of(args)
    try:
        if task.raw is not None:
            find_corpus(task.raw, args.src, args.tgt)  # before anything is made for it
        work = (args.work or ROOT / "runs/demo" / (task.raw.name if task.raw else "grammar")).resolve()
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DemoError(f"another demo is working in {work}") from None
            say(f"work folder: {work}")
            data, *langs = prepare(args, task, work)
            results = train_and_score(args, task, work, data, tuple(langs))
            print(write_report(work, data, *langs, results), flush=True)
    except (CorpusError, DemoError, TrainingFailed, OSError) as error:
        print(f"demo.sh: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo.sh: interrupted; the same command continues", file=sys.stderr)
        return 130
    say(f"total: {(time.monotonic() - start) / 60:.1f} minutes; report: {work / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
