"""A row of RESULTS.md, behind scripts/reproduce.sh: prepare, train each seed, tune on valid, score the test set."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightconv_plugin.recipes.reproduce import training as training
from lightconv_plugin.recipes.reproduce.job import Job, parse, plan
from lightconv_plugin.recipes.reproduce.protocol import ROOT, ProtocolError, row_digest
from lightconv_plugin.recipes.reproduce.state import State, StateError, StepFailed, heed_signals, identity
from lightconv_plugin.recipes.reproduce.table import (
    RESULTS,
    TABLE,
    RowError,
    command,
    main_scores,
    summarise,
    write_row,
    write_table,
)
from lightconv_plugin.recipes.steps import say

SCRIPTS = ROOT / "scripts"
# What is shown of the messages of tuning and scoring; fairseq's own are in the logs.
PROGRESS = re.compile(r"\s*tuning: |lightconv |generating ")
# `lightconv` in the environment of a process that computes, which the scripts make for themselves.
TOOLS = ("bash", "-c", 'source "$0"; use_python; compute_environment; lightconv "$@"', str(SCRIPTS / "lib.sh"))


def versions() -> dict[str, str | None]:
    """Of what computed a score: python, torch, fairseq, sacrebleu, and the commit of this checkout where it is one."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    # fairseq comes as one of two distributions, by the version of Python.
    for name in ("torch", "fairseq", "fairseq-fixed", "sacrebleu"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {"commit": commit()}


def commit() -> str | None:
    """The commit of this checkout, with a + where code or configurations have been changed since; None without git."""
    if not (ROOT / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = head and git("status", "--porcelain", "--", "lightconv_plugin", "scripts", "configs", "cpu", "cuda")
    except OSError:  # no git on this machine
        return None
    return f"{head}+" if head and changed else head


class Reproduction:
    """The steps of one row; each is skipped when it is done and nothing that it depends on has changed."""

    def __init__(self, job: Job, state: State) -> None:
        self.job, self.state = job, state
        self.environment = os.environ | {"LIGHTCONV_PYTHON": sys.executable}

    def log(self, step: str) -> Path:
        return self.job.folder / "logs" / f"{step.replace('/', '.')}.log"

    def step(self, name: str, title: str, inputs: Mapping[str, Any], make: Any) -> Any:
        """The result of `make()`, or the one of before where the inputs are the same."""
        if self.state.is_known(name):
            changed = self.state.changed(name, inputs)
            if not changed:
                say(f"{title}: done before")
                return self.state.result(name)
            say(f"{title}: done again, changed: {shorten(changed)}")
        else:
            say(f"{title} ...")
        return self.state.record(name, inputs, make())

    def data_files(self, *prefixes: str) -> dict[str, str]:
        """Digests of the dictionaries and of these parts of the data."""
        files = [path for path in self.job.data.iterdir() if path.name.split(".")[0] in ("dict", *prefixes)]
        return self.state.digests(sorted(files), self.job.data)

    def prepare(self) -> None:
        """The protocol's command; it knows itself what is done."""
        if self.job.prepare != ("",):
            program, *options = self.job.protocol.prepare
            say(f"preparing: {program}")
            self.state.run(
                [ROOT / program, *options, *self.job.prepare], self.log("prepare"), self.environment, lambda line: None
            )
        if not list(self.job.data.glob("train.*.idx")) + list(self.job.data.glob("train.idx")):
            raise ProtocolError(f"{self.job.data} has no binarised training text (train*.idx)")

    def train(self, seed: int) -> dict[str, Any]:
        """Train a seed, or find that it is trained: the facts of its training."""
        name, folder, settings = f"seed{seed}/train", self.job.folder / f"seed{seed}", self.job.settings
        inputs = {"settings": settings, "data": self.data_files("train", "valid")}
        training.wait_for_training(folder)
        last = identity(folder / "checkpoint_last.pt")
        if self.state.is_known(name):
            known, changed = self.state.result(name), self.state.changed(name, inputs)
            if changed:
                aside = f"; the former one is kept as {training.move_aside(folder).name}" if folder.exists() else ""
                say(f"seed {seed}: trained anew, changed: {shorten(changed)}{aside}")
                self.state.forget(f"seed{seed}/")
            # checkpoint_last.pt may be removed to save room; without any checkpoint the training is begun again.
            elif known and last in (None, known["last"]) and training.numbered(folder):
                say(f"seed {seed}: trained before, {known['facts']['updates']:,} updates")
                return known["facts"]
        finished, updates, stored = training.progress(folder, settings)
        if stored and not self.state.is_known(name):
            training.check_same(folder, settings, seed, stored, self.job.data)
            say(f"seed {seed}: taking over the training in {folder}, {updates:,} updates")
        self.state.record(name, inputs, None)
        if not finished:
            say(f"seed {seed}: training in {folder}" + (f", going on from update {updates:,}" if updates else ""))
            overrides = [f"checkpoint.save_dir={folder}", f"common.seed={seed}", *self.job.overrides]
            show = training.ProgressLine(f"seed {seed}", settings.get("optimization.max_update", "?"))
            self.state.run([SCRIPTS / "train.sh", self.job.config, *overrides], self.log(name), self.environment, show)
            finished, updates, _ = training.progress(folder, settings)
            if not finished:
                raise StepFailed(f"train.sh ended after {updates:,} updates, too early: see {folder / 'train.log'}")
        facts = training.facts(folder, updates, self.log(name))
        self.state.record(name, inputs, {"last": identity(folder / "checkpoint_last.pt"), "facts": facts})
        return facts

    def references(self, subset: str) -> dict[str, str]:
        """Digests of what scorers find beside the data: raw references, and whether the text is lower-cased."""
        corpus = self.job.data.parent
        beside = (corpus / "corpus.json", corpus / "raw" / f"{subset}.{self.job.target_lang}")
        return self.state.digests([path for path in beside if path.is_file()], corpus)

    def tune(self, seed: int) -> dict[str, Any]:
        """Choose averaging and length penalty on valid: {"average", "lenpen", "score", "checkpoint", …}."""
        folder, tuning = self.job.folder / f"seed{seed}", self.job.protocol.tune
        generate, name = self.job.protocol.generate_of(self.job.system), f"seed{seed}/tune"
        inputs = {
            "checkpoints": training.numbered(folder),
            "average": list(tuning.average),
            "lenpen": list(tuning.lenpen),
            "by": tuning.by,
            "grid": tuning.grid,
            "generate": generate,
            "data": self.data_files("valid") | self.references("valid"),
        }
        output = folder / "tune.json"
        tool = [*TOOLS, "tune", self.job.data, folder, "--subset", "valid", "--by", tuning.by, "--skip-missing"]
        tool += ["--average", *map(str, tuning.average), "--json", "--output", output]
        if tuning.lenpen:
            tool += ["--lenpen", *(f"{lenpen:g}" for lenpen in tuning.lenpen)] + (["--grid"] if tuning.grid else [])
        tool += ["--", *generate]

        def make() -> dict[str, Any]:
            self.state.run(tool, self.log(name), self.environment, shown=PROGRESS)
            found = json.loads(output.read_text(encoding="utf-8"))
            chosen = {key: found[key] for key in ("average", "lenpen", "score", "tried")}
            checkpoint = Path(found["checkpoint"]).name
            return chosen | {"checkpoint": checkpoint, "identity": identity(folder / checkpoint)}

        title, known = f"seed {seed}: tuning on valid", self.state.result(name)
        if known and identity(folder / known["checkpoint"]) != known["identity"]:
            say(f"{title}: {folder / known['checkpoint']} is gone or has changed")
            self.state.forget(name)
        return self.step(name, title, inputs, make)

    def test(self, seed: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Score the test set with what tuning chose: {"score": what the scorer printed, "versions"}."""
        protocol, checkpoint = self.job.protocol, self.job.folder / f"seed{seed}" / chosen["checkpoint"]
        generate, name = protocol.generate_of(self.job.system), f"seed{seed}/test"
        inputs = {
            "checkpoint": chosen["identity"],
            "lenpen": chosen["lenpen"],
            "generate": generate,
            "score": list(protocol.score),
            "data": self.data_files("test") | self.references("test"),
        }
        if protocol.metric == "perplexity":
            tool = [SCRIPTS / "perplexity.sh", self.job.data, checkpoint, "--subset", "test", "--json"]
            tool += [*protocol.score, *generate]
        else:
            tool = [SCRIPTS / "score.sh", self.job.data, checkpoint, "--subset", "test", "--json"]
            tool += ["--metric", protocol.metric, *protocol.score, *generate, "--lenpen", f"{chosen['lenpen']:g}"]

        def make() -> dict[str, Any]:
            said = self.state.run(tool, self.log(name), self.environment, shown=PROGRESS)
            return {"score": last_json(said), "versions": versions()}

        return self.step(name, f"seed {seed}: scoring the test set", inputs, make)

    def row(self) -> dict[str, Any]:
        """All steps; the row."""
        job, protocol = self.job, self.job.protocol
        self.prepare()
        runs, scored = [], []
        for seed in job.seeds:
            facts = self.train(seed)
            chosen = self.tune(seed)
            tested = self.test(seed, chosen)
            score = tested["score"]
            names = (*main_scores(protocol.metric, protocol.tune.by), "bleu_tok", "sacrebleu", "chrf")
            run = {
                "seed": seed,
                "valid": chosen["score"],
                "average": chosen["average"],
                "lenpen": chosen["lenpen"],
                "test": {name: score[name] for name in dict.fromkeys(names) if name in score},
                "parameters": score["parameters"],
                **facts,
            }
            runs.append(run)
            scored.append(tested)
            shown = ", ".join(f"{name} {value:.2f}" for name, value in run["test"].items())
            lenpen = "" if run["lenpen"] is None else f", lenpen {run['lenpen']:g}"
            say(f"seed {seed}: valid {run['valid']:.2f} (average {run['average']}{lenpen}); test {shown}")
        config = job.config.relative_to(ROOT) if job.config.is_relative_to(ROOT) else job.config
        signatures = [one["score"].get(key) for one in scored for key in ("signature", "chrf_signature")]
        return {
            "task": protocol.task,
            "system": job.system,
            "system_title": protocol.systems[job.system].title,
            "title": protocol.title,
            "measure": protocol.measure,
            "test": protocol.test,
            "metric": protocol.metric,
            "by": protocol.tune.by,
            "command": command(str(config), job.seeds, job.changing),
            "overrides": list(job.changing),
            "generate": protocol.generate_of(job.system),
            "digest": row_digest(protocol, job.system, job.settings),
            "runs": runs,
            "summary": summarise(runs, protocol.metric),
            "signatures": [text for text in dict.fromkeys(signatures) if text],
            "versions": unique([one["versions"] for one in scored]),
        }


def unique(values: Sequence[Any]) -> list[Any]:
    """Without repetitions, in order."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def shorten(lines: Sequence[str], most: int = 6) -> str:
    """Lines as one, a few of many."""
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")


def last_json(text: str) -> dict[str, Any]:
    """The JSON object in the last line of a tool's output."""
    return json.loads(text.strip().splitlines()[-1])


def main() -> int:
    args = parse(sys.argv[1:])
    heed_signals()
    try:
        if args.table:
            results = (args.results or RESULTS).resolve()
            table = results / "RESULTS.md" if args.results else TABLE
            write_table(results, table, ROOT / "configs")
            say(f"table: {table}")
            return 0
        job = plan(args)
        with State(job.folder) as state:
            row = Reproduction(job, state).row()
            path = write_row(job.results, row)
        # A place of one's own holds what was made there; the list of everything is the project's RESULTS.md.
        configs = job.config.parents[len(Path(row["task"]).parts)]
        text = write_table(job.results, job.table, configs, None if job.table == TABLE else [row["task"]])
        print(text[text.index(f"## {job.protocol.title}\n") :].split("\n## ")[0], flush=True)
        say(f"row: {path}; table: {job.table}")
    except (ProtocolError, StateError, StepFailed, RowError, training.OtherTraining, OSError) as error:
        print(f"reproduce.sh: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nreproduce.sh: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
