"""The demonstration: prepares a corpus, trains two systems at the same time, scores them, writes the reports."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.checkpoints.averaging import average_once, candidates, last_checkpoints
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write, locked
from lightconv_plugin.paths import find_config, workspace
from lightconv_plugin.recipes.data import parallel_text
from lightconv_plugin.recipes.data.parallel_folder import Corpus, CorpusError, find_corpus, locate
from lightconv_plugin.recipes.data.parallel_text import Settings
from lightconv_plugin.recipes.data.text_pool import count_lines
from lightconv_plugin.recipes.demo.corpus import write_corpus
from lightconv_plugin.recipes.demo.results import Result, read_log, write_report
from lightconv_plugin.recipes.demo.training import Training, run_together
from lightconv_plugin.recipes.environment import environment, quietly
from lightconv_plugin.recipes.steps import cores, digest, say, write_text

SYSTEMS = ("dynamicconv", "transformer")
AVERAGED = 3  # checkpoints, of the last three twentieths of a training
SIZES = {"train": 16000, "valid": 500, "test": 500}  # sentence pairs of the grammar's corpus
# A model that has not learnt to stop would otherwise write 200 tokens a sentence.
SEARCH = ("--max-len-a", "2", "--max-len-b", "20")


@dataclass(frozen=True)
class Task:
    """The settings for a corpus: the name of its folder of configurations, updates of a training, BPE merges."""

    configs: str
    updates: int
    merges: int


def demo(
    raw: Path | None = None,
    *,
    updates: int | None = None,
    seed: int = 1,
    work: Path | None = None,
    src: str | None = None,
    tgt: str | None = None,
) -> str:
    """The table of both systems and some translations, as Markdown.

    Everything is left in the work folder; what is done is not done again.

    Args:
        raw: a folder of parallel text; None: English–German text written by a grammar.
        updates: length of a training; None: as the configuration says.
        seed: of the grammar and of the trainings.
        work: None: runs/demo/NAME in the workspace, NAME being that of `raw`, or "grammar".
        src, tgt: languages, if the file names of `raw` do not tell.

    Raises:
        InputError: an argument or the text is wrong, or the folder is in use.
        TrainingFailed: a training failed.
    """
    if updates is not None and updates < 4 * AVERAGED:
        raise InputError(f"`updates` must be at least {4 * AVERAGED}, got {updates}")
    if raw is None and (src or tgt):
        raise InputError("`src` and `tgt` need a folder of text; the grammar's corpus is English–German")
    start = time.monotonic()
    try:
        if raw is not None:
            find_corpus(raw, src, tgt)  # before anything is made for it
        work = (work or workspace() / "runs/demo" / (raw.resolve().name if raw else "grammar")).resolve()
        work.mkdir(parents=True, exist_ok=True)
        with locked(work / "lock", f"another demo is working in {work}"):
            say(f"work folder: {work}")
            if raw is None:
                write_corpus(work / "text", seed, SIZES)
            corpus = find_corpus(raw.resolve() if raw else work / "text", src, tgt)
            task = task_of(raw, corpus, updates)
            parallel_text.prepare(corpus, work / "data", Settings(bpe=task.merges, workers=cores(), keep_last=True))
            results = train_and_score(task, seed, work, work / "data", (corpus.src, corpus.tgt))
            table = write_report(work, work / "data", corpus.src, corpus.tgt, results)
            page = write_page(work)
    except CorpusError as error:
        raise InputError(str(error)) from error
    say(f"total: {(time.monotonic() - start) / 60:.1f} minutes; now open {page}")
    return table


def task_of(raw: Path | None, corpus: Corpus, updates: int | None) -> Task:
    """Small models for the grammar's corpus (`raw` None) and folders no larger, those of Multi30k for larger ones."""
    small = raw is None or count_lines(locate(corpus.folder, corpus.train, corpus.src)) <= 20000
    return Task("demo", updates or 1500, 2000) if small else Task("multi30k_en_de", updates or 1600, 10000)


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


def claim(folder: Path, key: str) -> None:
    """Make `folder` that of the training known by `key`: one with the same key is resumed, another one is removed."""
    marker = folder / "demo.key"
    if folder.exists() and not (marker.is_file() and marker.read_text() == key):
        if not marker.is_file():
            raise InputError(f"{folder} exists and is not from a demo: choose another `work` folder")
        say(f"{folder.name}: the text or the settings changed, trained again")
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    write_text(marker, key)


def threads_each(systems: int) -> tuple[int, bool]:
    """(threads of a training, whether all train at the same time).

    A model this small gains little from a second thread: on two cores, two trainings at once are done sooner than one
    after the other. On a GPU they would only share it.
    """
    import torch

    together = not torch.cuda.is_available() and cores() >= systems
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(said or (cores() // systems if together else cores())), together


def train_and_score(task: Task, seed: int, work: Path, data: Path, langs: tuple[str, str]) -> list[Result]:
    """Both systems, each trained, averaged and scored unless its result exists."""
    text = digest(data / "data-bin")
    trainings = []
    for system in SYSTEMS:
        config = find_config(f"{task.configs}/{system}")
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
        command = [sys.executable, "-m", "lightconv_plugin", "train", str(config)]
        command += [f"{name}={value}" for name, value in settings.items()]
        trainings.append(Training(system, command, task.updates, folder, key))
    if trainings:
        run_trainings(trainings, task, data)
    return [Result.read(work / system / "result.json") for system in SYSTEMS]


def run_trainings(trainings: list[Training], task: Task, data: Path) -> None:
    """Train, translate and score; writes each system's result.json."""
    threads, together = threads_each(len(SYSTEMS))
    for group in [trainings] if together else [[training] for training in trainings]:
        how = f"at the same time, threads each: {threads}" if len(group) > 1 else f"threads: {threads}"
        say(f"training {' and '.join(t.name for t in group)}, {task.updates} updates ({how})")
        with environment(threads):
            run_together(group, os.environ)
    with quietly():
        from lightconv_plugin.recipes.evaluation import evaluate, results_of

    for training in trainings:
        folder = training.folder
        say(f"{training.name}: averaging the last {AVERAGED} checkpoints, beam search on the test set")
        checkpoint = folder / f"average{AVERAGED}.pt"
        average_once(last_checkpoints(candidates([folder]), AVERAGED, update_based=True), checkpoint)
        score = evaluate(data / "data-bin", checkpoint, options=SEARCH)
        log = read_log(folder / "train.log")
        Result(
            key=training.key,
            system=training.name,
            score=score.values,
            parameters=log.parameters,
            tokens_per_second=log.tokens_per_second,
            seconds=log.seconds,
            updates=task.updates,
            averaged=AVERAGED,
            threads=threads,
            together=together,
            generated=str(results_of(checkpoint, "test")[0]),
        ).write(folder / "result.json")


def write_page(work: Path) -> Path:
    """The page of `lightconv report`, unless it is newer than the results; report.md if its libraries are missing."""
    page, results = work / "report.html", [work / system / "result.json" for system in SYSTEMS]
    if page.is_file() and all(result.stat().st_mtime < page.stat().st_mtime for result in results):
        return page
    try:
        from lightconv_plugin.report.assemble import make_report
    except ModuleNotFoundError as error:
        get = "pip install 'lightconv-plugin[report]', then rerun the same command"
        say(f"no page with curves and kernels: {error.name} is not installed: {get}")
        return work / "report.md"
    report = make_report([work / system for system in SYSTEMS], work / "data/data-bin")
    with atomic_write(page) as file:
        file.write(report.page)
    return page
