"""Makes one row of the results: prepare, train each seed, tune on the validation set, score the test set."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightconv_plugin.diagnostics.checks import fairseqs
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_folder
from lightconv_plugin.paths import beside, configs_dir, package_dir
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.tasks import prepare
from lightconv_plugin.recipes.environment import compute_here
from lightconv_plugin.recipes.evaluation import (
    check_eval_lm,
    check_search,
    evaluate,
    languages_in,
    measure_perplexity,
)
from lightconv_plugin.recipes.reproduce import training
from lightconv_plugin.recipes.reproduce.job import Job
from lightconv_plugin.recipes.reproduce.protocol import row_digest, short_digest
from lightconv_plugin.recipes.reproduce.rows import add_row, check_row, main_scores, read_rows, summarise
from lightconv_plugin.recipes.reproduce.table import (
    check_table,
    config_name,
    default_table,
    render_section,
    sections,
    write_table,
)
from lightconv_plugin.recipes.reproduce.training import identity
from lightconv_plugin.recipes.steps import Steps, shorten
from lightconv_plugin.recipes.training.child import Child, TrainingFailed, run_together
from lightconv_plugin.recipes.tuning import check_not_own, tune
from lightconv_plugin.scoring.measuring import Languages, check_binarised, languages_of
from lightconv_plugin.scoring.perplexity import split_context_window


@dataclass(frozen=True)
class Reproduced:
    """A finished reproduction: the file of its row, the file of the table, and the task's section of the table."""

    row: Path
    table: Path
    section: str


def reproduce(job: Job) -> Reproduced:
    """Make a row, skipping what is done already, and rewrite the table.

    The state is kept in .steps/ of the job's folder. After an interruption, the same call resumes; a step is repeated
    only when something that it depends on has changed. Training runs in a separate process, which is terminated when
    an exception, such as KeyboardInterrupt, ends this call.

    Raises:
        InputError: the data or a training in the folder do not match the job, a file of the results is not a row, that
            of the table is another, or preparing, tuning or scoring failed.
        TrainingFailed: a training failed.
    """
    check_folder(job.results)
    check_table(job.table)
    read_rows(job.results)  # damaged ones are named before the training
    check_row(job.results, job.protocol.task, job.system)
    with Steps(job.folder) as steps:
        row = Reproduction(job, steps).row()
    path = add_row(job.results, row)
    # A table elsewhere lists only what was run; the default one lists all tasks.
    not_run = job.table == default_table()
    write_table(job.results, job.table, configs_dir(), not_run)
    known = sections(job.results, configs_dir(), not_run=False)
    section = next(render_section(one) for one in known if one.task == row["task"])
    return Reproduced(path, job.table, section)


def versions() -> dict[str, str | None]:
    """Versions of what computed a score: python, torch, fairseq, sacrebleu, and the commit if this is a checkout."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", *fairseqs(), "sacrebleu"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed | {"commit": commit()}


def commit() -> str | None:
    """The commit of this checkout, with a + if code or configurations have changed since; None without git."""
    checkout = package_dir().parent
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = head and git("status", "--porcelain", "--", "lightconv_plugin", "scripts", "configs", "cpu", "cuda")
    except OSError:  # no git on this machine
        return None
    return f"{head}+" if head and changed else head


class Reproduction:
    """The steps of one row; a step is skipped if it is done and nothing that it depends on has changed."""

    def __init__(self, job: Job, steps: Steps) -> None:
        self.job, self.steps = job, steps
        self.environment = dict(os.environ)  # for trainings; this process changes its own later

    def data_files(self, *prefixes: str) -> dict[str, str]:
        """Digests of the dictionaries and of these parts of the data."""
        files = [path for path in self.job.data.iterdir() if path.name.split(".")[0] in ("dict", *prefixes)]
        return self.steps.digests(sorted(files), self.job.data)

    def references(self, subset: str) -> dict[str, str]:
        """Digests of what scorers read next to the data: raw references, and whether the text is lower-cased."""
        found: dict[str, str] = {}
        names = ["corpus.json"]
        if self.job.protocol.metric != "perplexity":
            names.append(f"raw/{subset}.{languages_of(self.job.data, subset, self.languages())[1]}")
        for name in names:
            if (path := beside(self.job.data, name)).is_file():
                found |= self.steps.digests([path], path.parents[name.count("/")])
        return found

    def prepare(self) -> None:
        """Prepare the data; the preparation itself skips what is done."""
        if self.job.prepare is not None:
            task, *options = self.job.prepare
            say(f"preparing {task}")
            try:
                prepare(task, options)
            except InputError as error:
                hint = " (options of lightconv prepare: in `prepare_options`)" if "--" in str(error) else ""
                raise InputError(f"{error}{hint}") from error
        if not list(self.job.data.glob("train.*.idx")) + list(self.job.data.glob("train.idx")):
            check_binarised(self.job.data, "train")
            hint = "run lightconv prepare first, or leave out `no_prepare`"
            if self.job.prepare is not None:  # it prepares what the text was distilled from
                hint = f"the comment in {self.job.config} says how it is made"
            raise InputError(f"{self.job.data} has no binarised training text (train*.idx): {hint}")

    def check_scoring(self) -> None:
        """Raise InputError, before any training, if translations of this data cannot be made or scored."""
        how = self.job.protocol.measuring()
        if how.metric != "perplexity":
            how = how.with_data(self.job.data, "test", self.languages())
            how.check_language()
        if all(self.steps.is_known(f"seed{seed}/train") for seed in self.job.seeds):
            return  # the rest checks them before it begins
        try:
            options = self.options()[1]
            check_not_own(options, how.metric)
            if how.metric == "perplexity":
                check_eval_lm(self.job.data, options)
            else:
                check_search(self.job.data, options, how, warn=lambda _: None)  # tuning warns
        except InputError as error:
            raise InputError(f"{self.job.protocol.path}: generate: {error}") from error

    def train(self, seed: int) -> dict[str, Any]:
        """Train a seed unless it is trained already; returns the facts about its training."""
        name, folder, settings = f"seed{seed}/train", self.job.folder / f"seed{seed}", self.job.settings
        depends = {"settings": settings, "data": self.data_files("train", "valid")}
        training.wait_for_training(folder)
        last = identity(folder / "checkpoint_last.pt")
        if self.steps.is_known(name):
            done, changed = self.steps.result(name), self.steps.changed(name, depends)
            if changed:
                aside = f"; the former one is kept as {training.move_aside(folder).name}" if folder.exists() else ""
                say(f"seed {seed}: training again, changed: {shorten(changed)}{aside}")
                self.steps.forget(f"seed{seed}/")
            # checkpoint_last.pt may be deleted to save disk space; without any checkpoint, training starts again.
            elif done and last in (None, done["last"]) and training.numbered(folder):
                say(f"seed {seed}: trained before, {done['facts']['updates']:,} updates")
                return done["facts"]
        finished, updates, stored = training.progress(folder, settings)
        known = self.steps.is_known(name)
        # A finished training may have been replaced, or continued with other settings; an interrupted one is our own.
        if stored and (not known or self.steps.result(name)):
            training.check_same(folder, settings, seed, stored, self.job.data)
        if stored and not known:
            say(f"seed {seed}: taking over the training in {folder}, {updates:,} updates")
        self.steps.record(name, depends, None)
        if not finished:
            say(f"seed {seed}: training in {folder}" + (f", resuming from update {updates:,}" if updates else ""))
            release_gpu_memory()
            overrides, length = (
                [f"common.seed={seed}", *self.job.overrides],
                settings.get("optimization.max_update", "?"),
            )
            child = Child(f"seed {seed}", self.job.config, overrides, folder, length)
            run_together([child], self.environment, lock=self.steps.fileno(), interval=60)
            finished, updates, _ = training.progress(folder, settings)
            if not finished:
                raise TrainingFailed(f"training ended after {updates:,} updates, too early: see {folder / 'train.log'}")
        facts = training.facts(folder, updates)
        self.steps.record(name, depends, {"last": identity(folder / "checkpoint_last.pt"), "facts": facts})
        return facts

    def tune(self, seed: int) -> dict[str, Any]:
        """Choose averaging and length penalty on valid: {"average", "lenpen", "score", "checkpoint", …}."""
        folder, tuning = self.job.folder / f"seed{seed}", self.job.protocol.tune
        generate, by = self.job.protocol.generate_of(self.job.system), self.job.protocol.by
        choices: dict[str, Any] = {"average": list(tuning.average), "lenpen": list(tuning.lenpen)}
        choices |= {"by": by, "grid": tuning.grid} | ({"within": tuning.within} if tuning.within else {})
        depends = {
            "checkpoints": training.numbered(folder),
            **choices,
            "generate": generate,
            "data": self.data_files("valid") | self.references("valid"),
        }

        def make() -> dict[str, Any]:
            window, options = self.options()
            found = tune(
                self.job.data, folder, **choices, options=options, context_window=window, skip_missing=True, warn=say
            )
            chosen = {key: found[key] for key in ("average", "lenpen", "score", "tried")}
            checkpoint = Path(found["checkpoint"]).name
            return chosen | {"checkpoint": checkpoint, "identity": identity(folder / checkpoint)}

        def intact(known: Mapping[str, Any]) -> bool:
            return identity(folder / known["checkpoint"]) == known["identity"]

        return self.steps.value(f"seed{seed}/tune", f"seed {seed}: tuning on valid", make, depends, intact)

    def test(self, seed: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Score the test set with what tuning chose: {"score": scores by name, "versions"}."""
        protocol, checkpoint = self.job.protocol, self.job.folder / f"seed{seed}" / chosen["checkpoint"]
        generate = protocol.generate_of(self.job.system)
        depends = {
            "checkpoint": chosen["identity"],
            "lenpen": chosen["lenpen"],
            "generate": generate,
            "score": protocol.score.settings(),
            "data": self.data_files("test") | self.references("test"),
        }

        def make() -> dict[str, Any]:
            window, options = self.options()
            if protocol.metric == "perplexity":
                found = measure_perplexity(self.job.data, checkpoint, "test", window, options)
            else:
                options = [*options, "--lenpen", repr(chosen["lenpen"])]
                found = evaluate(self.job.data, checkpoint, options=options, how=protocol.measuring()).values
            return {"score": found, "versions": versions()}

        return self.steps.value(f"seed{seed}/test", f"seed {seed}: scoring the test set", make, depends)

    def options(self) -> tuple[int, list[str]]:
        """(the context window, for language models, the other options of fairseq-generate or fairseq-eval-lm)."""
        generate, (source, target) = self.job.protocol.generate_of(self.job.system), self.job.languages
        if self.job.protocol.metric == "perplexity":
            return split_context_window(generate)
        direction = [] if source is None or target is None else ["--source-lang", source, "--target-lang", target]
        return 0, [*generate, *direction]

    def languages(self) -> Languages:
        """(source, target) of the search; None if the names of the data's files say it."""
        return languages_in(self.options()[1])

    def row(self) -> dict[str, Any]:
        """Run all steps; returns the row."""
        job, protocol = self.job, self.job.protocol
        self.prepare()
        compute_here()
        self.check_scoring()
        data = short_digest(self.data_files("train", "valid", "test"))
        beside_data = {**self.references("valid"), **self.references("test")}
        references = short_digest({name: sha for name, sha in beside_data.items() if name.startswith("raw/")})
        runs, scored = [], []
        for seed in job.seeds:
            facts = self.train(seed)
            chosen = self.tune(seed)
            tested = self.test(seed, chosen)
            score = tested["score"]
            names = (*main_scores(protocol.metric, protocol.by), "bleu_tok", "sacrebleu", "chrf")
            run = {
                "seed": seed,
                "data": data,
                "references": references,
                "valid": chosen["score"],
                "average": chosen["average"],
                "lenpen": chosen["lenpen"],
                "test": {name: score[name] for name in dict.fromkeys(names) if name in score},
                "parameters": score["parameters"],
                **({"search": score["search"]} if "search" in score else {}),
                **facts,
            }
            runs.append(run)
            scored.append(tested)
            shown = ", ".join(f"{name} {value:.2f}" for name, value in run["test"].items())
            lenpen = "" if run["lenpen"] is None else f", lenpen {run['lenpen']:g}"
            say(f"seed {seed}: valid {run['valid']:.2f} (average {run['average']}{lenpen}); test {shown}")
        signatures = [one["score"].get(key) for one in scored for key in ("signature", "chrf_signature")]
        return {
            "task": protocol.task,
            "system": job.system,
            "system_title": protocol.title_of(job.system),
            "title": protocol.title,
            "measure": protocol.measure,
            "test": protocol.test,
            "metric": protocol.metric,
            "by": protocol.by,
            "config": config_name(job.config),
            "overrides": list(job.changing),
            "prepare_options": job.prepare_options,
            "generate": protocol.generate_of(job.system),
            "digest": row_digest(protocol, job.system, job.settings),
            "runs": runs,
            "summary": summarise(runs, protocol.metric),
            "signatures": [text for text in dict.fromkeys(signatures) if text],
            "versions": unique([one["versions"] for one in scored]),
        }


def release_gpu_memory() -> None:
    """Free the GPU memory that generation used in this process, for the training."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def unique(values: Sequence[Any]) -> list[Any]:
    """The values without duplicates, in order."""
    return [value for i, value in enumerate(values) if value not in values[:i]]
