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

from lightconv_plugin.recipes.data import parallel_text
from lightconv_plugin.recipes.data.parallel_folder import Corpus, CorpusError, find_corpus, locate
from lightconv_plugin.recipes.data.text_pool import count_lines
from lightconv_plugin.recipes.demo.results import Result, read_log, write_report
from lightconv_plugin.recipes.demo.training import Training, TrainingFailed, run_together
from lightconv_plugin.recipes.steps import cores, digest, say, write_text

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SYSTEMS = ("dynamicconv", "transformer")
AVERAGED = 3  # checkpoints, of the last three twentieths of a training


class DemoError(Exception):
    """Something the user can mend; shown as one line."""


@dataclass(frozen=True)
class Task:
    """The settings for a corpus: configurations, updates of a training, BPE merges."""

    configs: Path
    updates: int
    merges: int


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh", description="Train DynamicConv and a Transformer, compare their BLEU."
    )
    parser.add_argument("raw", nargs="?", type=Path, metavar="DIR", help="folder of parallel text")
    parser.add_argument("--updates", type=int, metavar="N", help="length of a training (default: its configuration's)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the grammar and of the training")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where everything goes (default: runs/demo/NAME)")
    parser.add_argument("--src", metavar="XX", help="source language, if the file names do not tell")
    parser.add_argument("--tgt", metavar="YY", help="target language")
    args = parser.parse_args(argv)
    if args.updates is not None and args.updates < 4 * AVERAGED:
        parser.error(f"--updates must be at least {4 * AVERAGED}, got {args.updates}")
    if args.seed < 0:
        parser.error(f"--seed must be at least 0, got {args.seed}")
    if args.raw is None and (args.src or args.tgt):
        parser.error("--src and --tgt go with a folder of text; the grammar's corpus is English–German")
    return args


def task_of(raw: Path | None, corpus: Corpus, updates: int | None) -> Task:
    """Small models for the grammar's corpus (`raw` None) and folders no larger, those of Multi30k for larger ones."""
    small = raw is None or count_lines(locate(corpus.folder, corpus.train, corpus.src)) <= 20000
    if small:
        return Task(ROOT / "configs/demo", updates or 1500, merges=2000)
    return Task(ROOT / "configs/multi30k_en_de", updates or 1600, merges=10000)


def schedule(updates: int) -> dict[str, int | str]:
    """Overrides that give a training this length: it ends with a learning rate of 0, whatever the corpus' size."""
    return {
        "optimization.max_update": updates,
        "lr_scheduler.total_num_update": updates,
        "lr_scheduler.warmup_updates": updates * 5 // 16,
        "checkpoint.save_interval_updates": updates // 20 or 1,
        "checkpoint.keep_interval_updates": AVERAGED,
        "checkpoint.no_epoch_checkpoints": "true",
    }


def run(*command: str | Path) -> None:
    """A command whose messages go to the terminal; its own error message is enough when it fails."""
    if subprocess.run([str(part) for part in command], check=False).returncode != 0:
        raise DemoError(f"{Path(command[1]).name} failed")


def find_text(args: argparse.Namespace, work: Path) -> Corpus:
    """The raw text: that of the folder given, or written now."""
    if args.raw is not None:
        return find_corpus(args.raw.resolve(), args.src, args.tgt)
    run(sys.executable, "-m", "lightconv_plugin.recipes.demo.corpus", "--out", work / "text", "--seed", str(args.seed))
    return find_corpus(work / "text")


def prepare(corpus: Corpus, task: Task, data: Path) -> None:
    """The corpus as fairseq's binary data, `data`/data-bin, with the text beside it."""
    parallel_text.prepare(corpus, data.resolve(), parallel_text.Settings(bpe=task.merges, workers=cores()))


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
    together = not torch.cuda.is_available() and cores >= systems
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(said or (cores // systems if together else cores)), together


def train_and_score(task: Task, seed: int, work: Path, data: Path, langs: tuple[str, str]) -> list[Result]:
    """Both systems, each trained, averaged and scored unless its result is there already."""
    text = digest(data / "data-bin")
    trainings = []
    for system in SYSTEMS:
        config = task.configs / f"{system}.yaml"
        known = f"{digest(config)} {task.updates} {text} {langs} {seed}"
        folder, key = work / system, hashlib.sha256(known.encode()).hexdigest()
        result = Result.read(folder / "result.json")
        if result and result.key == key:
            say(f"{system}: trained and scored before")
            continue
        claim(folder, key)
        (folder / "result.json").unlink(missing_ok=True)
        settings = {
            "task.data": data / "data-bin",
            "task.source_lang": langs[0],
            "task.target_lang": langs[1],
            "checkpoint.save_dir": folder,
            "common.seed": seed,
            **schedule(task.updates),
        }
        command = [str(SCRIPTS / "train.sh"), str(config), *(f"{name}={value}" for name, value in settings.items())]
        trainings.append(Training(system, command, task.updates, folder, key))
    if trainings:
        run_trainings(trainings, task, data)
    return [Result.read(work / system / "result.json") for system in SYSTEMS]


def run_trainings(trainings: list[Training], task: Task, data: Path) -> None:
    """Train, translate and score; writes each system's result.json."""
    threads, together = threads_each(len(SYSTEMS))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    for group in [trainings] if together else [[training] for training in trainings]:
        how = f"at the same time, threads each: {threads}" if len(group) > 1 else f"threads: {threads}"
        say(f"training {' and '.join(t.name for t in group)}, {task.updates} updates ({how})")
        run_together(group, environment)
    for training in trainings:
        checkpoint, score = translate(training.folder, data, environment)
        log = read_log(training.folder / "train.log")
        Result(
            key=training.key,
            system=training.name,
            score=score,
            parameters=log.parameters,
            tokens_per_second=log.tokens_per_second,
            seconds=log.seconds,
            updates=task.updates,
            averaged=AVERAGED,
            threads=threads,
            together=together,
            generated=str(checkpoint.with_suffix(".test.gen")),
        ).write(training.folder / "result.json")


def translate(folder: Path, data: Path, environment: dict[str, str]) -> tuple[Path, dict]:
    """Average the last checkpoints, translate and score the test set: (averaged checkpoint, the score)."""
    say(f"{folder.name}: averaging the last {AVERAGED} checkpoints, beam search on the test set")
    checkpoint = folder / f"average{AVERAGED}.pt"
    # A model that has not learnt to stop would otherwise write 200 tokens a sentence.
    options = ("--json", "--max-len-a", "2", "--max-len-b", "20")
    for command in (
        [SCRIPTS / "average.sh", folder, str(AVERAGED)],
        [SCRIPTS / "score.sh", data / "data-bin", checkpoint, *options],
    ):
        log = folder / "score.log"
        with log.open("a") as file:
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise DemoError(f"{Path(command[0]).name} failed for {folder.name}:\n{tail}\n(all of it: {log})")
    return checkpoint, json.loads(checkpoint.with_suffix(".test.score").read_text(encoding="utf-8"))


def main() -> int:
    args = parse()
    start = time.monotonic()
    try:
        if args.raw is not None:
            find_corpus(args.raw, args.src, args.tgt)  # before anything is made for it
        work = (args.work or ROOT / "runs/demo" / (args.raw.resolve().name if args.raw else "grammar")).resolve()
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DemoError(f"another demo is working in {work}") from None
            say(f"work folder: {work}")
            corpus = find_text(args, work)
            task = task_of(args.raw, corpus, args.updates)
            prepare(corpus, task, work / "data")
            langs = corpus.src, corpus.tgt
            results = train_and_score(task, args.seed, work, work / "data", langs)
            print(write_report(work, work / "data", *langs, results), flush=True)
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
