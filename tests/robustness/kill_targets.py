"""What `torture.py` kills: averaging, exporting, the build of a library, each preparation, distilling, training, and a
reproduction.

Everything runs on the miniatures of the other tests, by the commands that a user gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.ops.toy_libraries import PLAIN
from tests.recipes import conftest
from tests.recipes.conftest import script_environment
from tests.recipes.data.miniatures import PUBLISHED
from tests.recipes.reproduce import reproduction_world
from tests.robustness.torture import Fork, Process, Work, popen


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listing(folder: Path, loose: Iterable[str] = (), place: Path | None = None) -> dict[str, str]:
    """Digest of every file by its relative name; of the `loose`, which tell of times, only that they are there.

    place: a folder whose name may stand in the files, and is not compared.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file():
            is_loose = any(path.match(pattern) for pattern in loose)
            content = path.read_bytes()
            if place is not None:
                content = content.replace(str(place).encode(), b"PLACE")
            found[name] = "there" if is_loose else digest(content)
    return found


def state_digest(value: Any) -> str:
    """Of what a checkpoint holds: tensors bit for bit, containers in their order."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return digest(
            f"{value.dtype}{tuple(value.shape)}".encode() + value.view(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(value, dict):
        return digest("".join(f"{key!r}{state_digest(item)}" for key, item in value.items()).encode())
    if isinstance(value, (list, tuple)):
        return digest("".join(map(state_digest, value)).encode())
    return digest(repr(value).encode())


class Average(Work):
    """`lightconv average` on five checkpoints, which keep their times in every copy of the world."""

    name, title = "average", "`lightconv average`, 5 checkpoints"

    def build(self, world: Path) -> None:
        import torch

        from tests.checkpoints.fairseq_files import save

        draw = torch.Generator().manual_seed(7)
        for number in range(1, 6):
            parameters = {f"w{i}": torch.randn(64, 1024, generator=draw) for i in range(4)}
            save(world / f"checkpoint{number}.pt", parameters, updates=number)

    def start(self, place: Path, log: Path, token: str) -> Process:
        from lightconv_plugin.cli import main

        arguments = [
            "average",
            "--inputs",
            place,
            "--num-last-checkpoints",
            "4",
            "--output",
            place / "average4.pt",
            "--force",
        ]
        return Fork(main.main, [str(argument) for argument in arguments], log=log, token=token)

    def outcome(self, place: Path) -> dict[str, str]:
        return listing(place)


class Export(Work):
    """What `lightconv export` does once it has the model: a directory in the place of the one before."""

    name, title = "export", "writing an exported model of 2 MB"

    def build(self, world: Path) -> None:
        (world / "model").mkdir()

    def start(self, place: Path, log: Path, token: str) -> Process:
        return Fork(self._export, place, log=log, token=token)

    @staticmethod
    def _export(place: Path) -> None:
        from tests.checkpoints import exports

        config = exports.pair(ffn_dim=512)
        exports.export(place / "model", exports.build_model(config, seed=7), weights="bfloat16", force=True)

    def outcome(self, place: Path) -> dict[str, str]:
        return listing(place)


class Build(Work):
    """The build of a small library, by what `lightconv build cpu` and the first call of an operator run."""

    name, title = "build", "`lightconv build cpu`, a small source"

    def build(self, world: Path) -> None:
        (world / "sources").mkdir()
        for name in ("one", "two"):
            (world / f"sources/{name}.cpp").write_text(PLAIN.replace("lightconv_answer", f"answer_{name}"))

    def start(self, place: Path, log: Path, token: str) -> Process:
        return Fork(self._make, place, log=log, token=token)

    @staticmethod
    def _make(place: Path) -> None:
        import ctypes

        from lightconv_plugin.ops import artifacts, compilation

        os.environ["TORCH_EXTENSIONS_DIR"] = str(place / "cache")
        artifacts.SOURCES["cpu"], artifacts.SHARED = place / "sources", ()
        artifacts.PREBUILT = place / "prebuilt"
        library = ctypes.CDLL(str(compilation.build(artifacts.recipe("cpu"))))
        if library.answer_one() != 42 or library.answer_two() != 42:
            raise RuntimeError("the library does not compute")

    def outcome(self, place: Path) -> dict[str, str]:
        return listing(place, ("build.json", "build.log", "*.lock", "*.failed"))


class Prepare(Work):
    """A preparation, in a workspace of its own, from a miniature of the published archives in a folder."""

    def __init__(self, task: str, make: Callable[[Path], object], *options: str) -> None:
        self.name, self.task = f"prepare_{task}", task
        self.title = f"`lightconv prepare {task}`, miniature archives"
        self._make, self._options = make, options
        # What another download into the same folder is told; text and binarised data are waited for.
        self.refusal = "another process is downloading"

    def build(self, world: Path) -> None:
        (world / "home").mkdir()
        (world / "mirror").mkdir()
        self._make(world / "mirror")

    def start(self, place: Path, log: Path, token: str) -> Process:
        mirror = str(place / "mirror")
        own = {"smoke": (), "parallel": ("--data", mirror)}
        options = own.get(self.task, ("--mirror", mirror, "--any-size"))
        command = [sys.executable, "-m", "lightconv_plugin", "prepare", self.task, *options, "--workers", "2"]
        environment = script_environment(sys.executable, LIGHTCONV_HOME=str(place / "home"))
        return popen([*command, *self._options], log, token, environment, place)

    def progress(self, place: Path) -> int:
        return int((place / "home/data").exists() or (place / "home/runs").exists())

    def outcome(self, place: Path) -> dict[str, str]:
        folders = [place / "home/data", place / "home/runs"]
        loose = ("digests.json", "preprocess.log", "lock")
        return {
            f"{folder.name}/{k}": v for folder in folders if folder.exists() for k, v in listing(folder, loose).items()
        }


def _parallel(folder: Path) -> None:
    conftest.write_parts(folder, ("train",), (160,))


PREPARATIONS = (
    Prepare("smoke", lambda mirror: None),
    Prepare("multi30k_en_de", PUBLISHED["multi30k_en_de"], "--bpe", "100"),
    Prepare("parallel", _parallel, "--bpe", "100", "--valid-lines", "10", "--test-lines", "10"),
    *(Prepare(task, PUBLISHED[task]) for task in ("wikitext2", "wikitext103", "gbw", "wmt16_en_de")),
    Prepare("cnndm", PUBLISHED["cnndm"], "--bpe", "150"),
    Prepare("iwslt14_de_en", PUBLISHED["iwslt14_de_en"], "--bpe", "120"),
    Prepare("wmt14_en_de", PUBLISHED["wmt14_en_de"], "--bpe", "300"),
    Prepare("wmt14_en_fr", PUBLISHED["wmt14_en_fr"], "--bpe", "400"),
    Prepare("wmt17_zh_en", PUBLISHED["wmt17_zh_en"], "--bpe", "100"),
)


class Distill(Work):
    """`lightconv distill` of 300 pairs in eight blocks by a teacher with random weights."""

    name, title = "distill", "`lightconv distill`, 8 blocks"

    def build(self, world: Path) -> None:
        from lightconv_plugin.recipes.data.tasks import prepare
        from tests.recipes.distillation.toys import export_teacher

        parts = conftest.write_parts(world / "text", ("train", "val", "test_2016_flickr"), (300, 20, 20))
        options = ["--data", str(parts), "--out", str(world / "data"), "--bpe", "200", "--workers", "1"]
        prepare("multi30k_en_de", options)
        export_teacher(world / "teacher", world / "data")

    def start(self, place: Path, log: Path, token: str) -> Process:
        return Fork(self._distill, place, log=log, token=token)

    @staticmethod
    def _distill(place: Path) -> int:
        from lightconv_plugin.cli.main import main
        from lightconv_plugin.recipes.distillation import translating

        translating.PAIRS = 40
        options = ["--beam", "3", "--max-len-b", "12", "--max-repeats", "20", "--dtype", "float32", "--threads", "1"]
        return main(["distill", str(place / "teacher"), str(place / "data"), *options])

    def progress(self, place: Path) -> int:
        return int((place / "data_distilled").exists())

    def outcome(self, place: Path) -> dict[str, str]:
        return listing(place / "data_distilled", ("digests.json", "preprocess.log", "lock"), place)


class Train(Work):
    """`train.sh` on sixty sentences: three epochs of eight updates, a checkpoint after every third and every epoch."""

    name, title = "train", "`train.sh`, 24 updates, 10 checkpoints"
    refusal = "another training is writing"

    def build(self, world: Path) -> None:
        from tests.fairseq_cli import binarise

        (world / "text").mkdir()
        binarise(world / "text")

    def start(self, place: Path, log: Path, token: str) -> Process:
        sizes = [
            f"model.{side}_{what}=16" for side in ("encoder", "decoder") for what in ("embed_dim", "ffn_embed_dim")
        ]
        layers = [f"model.{side}_layers=1" for side in ("encoder", "decoder")]
        layers += [f"model.{side}_kernel_size_list=[3]" for side in ("encoder", "decoder")]
        overrides = [
            *(f"task.data={place / 'text/data-bin'}", "task.source_lang=de", "task.target_lang=en"),
            *("model.share_all_embeddings=false", "dataset.max_tokens=60", "dataset.num_workers=0"),
            *(
                "optimization.max_epoch=3",
                "checkpoint.save_interval_updates=3",
                "checkpoint.no_epoch_checkpoints=false",
            ),
            *(
                "lr_scheduler.warmup_updates=4",
                f"checkpoint.save_dir={place / 'run'}",
                "common.tensorboard_logdir=null",
            ),
        ]
        command = [ROOT / "scripts/train.sh", ROOT / "configs/demo/dynamicconv.yaml", *sizes, *layers, *overrides]
        return popen([str(part) for part in command], log, token, script_environment(sys.executable), place)

    def progress(self, place: Path) -> int:
        log = place / "run/train.log"
        return log.read_bytes().count(b"begin training epoch") + 1 if log.exists() else 0

    def outcome(self, place: Path) -> dict[str, str]:
        from lightconv_plugin.checkpoints.loading import safe_torch_load

        found = listing(place / "run", ("*.pt", "*.log", "records.jsonl", "lock", "hydra/**/*"))
        found = {name: state for name, state in found.items() if not name.startswith("hydra/")}
        for path in (place / "run").glob("*.pt"):
            state = safe_torch_load(path)
            extra = {k: v for k, v in state["extra_state"].items() if k not in ("metrics", "previous_training_time")}
            for part, value in (*((p, state[p]) for p in ("model", "last_optimizer_state")), ("extra_state", extra)):
                found[f"{path.name}: {part}"] = state_digest(value)
        return found


class Reproduce(Work):
    """`lightconv reproduce` of two seeds, its four steps by stand-ins that take a moment each."""

    name, title = "reproduce", "`lightconv reproduce`, 2 seeds, stand-ins"

    def build(self, world: Path) -> None:
        import lightconv_plugin.recipes.reproduce.run  # noqa: F401  (here once, and not in every child)

        (world / "templates").mkdir()
        reproduction_world.write_templates(world / "templates")
        reproduction_world.write_program(world / "train.sh")
        reproduction_world.task(world / "configs/task")

    def start(self, place: Path, log: Path, token: str) -> Process:
        arguments = [f"{place}/configs/task/dynamicconv.yaml", "--seeds", "1", "2", "--runs", f"{place}/runs"]
        arguments += ["--results", f"{place}/results", f"task.data={place}/data/data-bin"]
        return Fork(self._reproduce, place, arguments, log=log, token=token)

    @staticmethod
    def _reproduce(place: Path, arguments: list[str]) -> int:
        from lightconv_plugin.cli.main import main
        from lightconv_plugin.recipes.reproduce import run as reproduce

        os.environ |= {"CALLS": str(place / "calls"), "TEMPLATES": str(place / "templates"), "MOMENT": "0.1"}
        for module, name, instead in reproduction_world.stand_ins(place / "train.sh"):
            setattr(module, name, instead)
        reproduce.commit = lambda: "a commit"
        return main(["reproduce", *arguments])

    def progress(self, place: Path) -> int:
        calls = place / "calls"
        return calls.stat().st_size if calls.exists() else 0

    def outcome(self, place: Path) -> dict[str, str]:
        loose = ("*.log", "records.jsonl", ".steps/*")
        found = {}
        for folder in ("runs", "results", "data"):
            found |= {f"{folder}/{name}": state for name, state in listing(place / folder, loose, place).items()}
        return found


class ReproduceSmoke(Work):
    """`reproduce.sh --smoke` as it is: it prepares, trains two seeds, tunes and scores with fairseq."""

    name, title = "reproduce_smoke", "`reproduce.sh --smoke`, all of it"

    def build(self, world: Path) -> None:
        (world / "runs").mkdir()

    def start(self, place: Path, log: Path, token: str) -> Process:
        command = [str(ROOT / "scripts/reproduce.sh"), "--smoke", "--runs", str(place / "runs")]
        return popen(command, log, token, script_environment(sys.executable), place)

    def progress(self, place: Path) -> int:
        return int((place / "runs/data").exists())

    def outcome(self, place: Path) -> dict[str, str]:
        row = json.loads((place / "runs/results/smoke/dynamicconv.json").read_text(encoding="utf-8"))
        for run in row["runs"]:
            for key in ("tokens_per_second", "train_seconds"):
                run.pop(key)
        data = {f"data/{k}": v for k, v in listing(place / "runs/data/data-bin", ("preprocess.log",)).items()}
        return {"row": json.dumps(row, sort_keys=True)} | data


WORKS: dict[str, Work] = {
    work.name: work
    for work in (Average(), Export(), Build(), Reproduce(), *PREPARATIONS, Distill(), Train(), ReproduceSmoke())
}


def check_here() -> None:
    """The machine has what the trials need. RuntimeError says what it lacks."""
    if not Path("/proc/self/stat").exists():
        raise RuntimeError("processes are found in /proc, which is Linux's")
