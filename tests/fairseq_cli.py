"""fairseq's commands as a user types them, on a corpus of a few dozen lines; shared by the tests that need them.

They are run by `warm_python`: importing fairseq takes five seconds of processor time, most of what a small command
takes.
"""

import json
import os
import random
import re
import subprocess
from pathlib import Path

from tests.warm_python import warm_python

REPOSITORY = Path(__file__).resolve().parent.parent
USER_DIR = REPOSITORY / "lightconv_plugin"
SIZE = (
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 24 --decoder-ffn-embed-dim 24"
    " --encoder-attention-heads 4 --decoder-attention-heads 4 --encoder-layers 2 --decoder-layers 2"
    " --encoder-kernel-size-list 3,7 --decoder-kernel-size-list 3,7"
).split()
RECIPE = (
    "--optimizer adam --lr 1e-3 --lr-scheduler inverse_sqrt --warmup-updates 4 --criterion"
    " label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 --cpu --log-format json --log-interval 1"
    " --num-workers 0"
).split()
TIMEOUT = 300  # seconds


def run(command: str, *arguments, stdin: str | None = None, fails: bool = False, **environment) -> str:
    """`fairseq-<command> arguments`; its output, both streams. An unexpected exit status fails the test with it."""
    module = {"train": "train", "hydra-train": "hydra_train", "eval-lm": "eval_lm"}.get(command, command)
    status, out, err = run_module(f"fairseq_cli.{module}", arguments, stdin=stdin, **environment)
    output = f"{out}\n{err}"
    if (status != 0) != fails:
        raise AssertionError(f"fairseq-{command} exited with {status}:\n{output[-6000:]}")
    return output


def logged(log: str, name: str = "train_inner") -> list[dict]:
    """The statistics of each update, or of each validation ("valid"), in a log of `--log-format json`."""
    return [json.loads(line) for line in re.findall(rf"(?:\| {name} \||\[{name}\]).*?(\{{.*\}})", log)]


def run_module(module: str, arguments=(), stdin: str | None = None, cwd=None, **environment) -> tuple[int, str, str]:
    """`python -m module arguments`: (exit status, standard output, standard error)."""
    done = subprocess.run(
        [warm_python(), "-m", module, *map(str, arguments)],
        input=stdin or "",
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=TIMEOUT,
    )
    return done.returncode, done.stdout, done.stderr


def write_corpus(folder: Path) -> None:
    """train/valid/test.{de,en}: short sentences of a dozen words; the English is the German reversed."""
    words = "ich du er sieht hört den Hund die Katze das Haus nicht oft".split()
    generator = random.Random(3)
    for split, n in ("train", 60), ("valid", 12), ("test", 12):
        pairs = [[generator.choice(words) for _ in range(generator.randint(2, 9))] for _ in range(n)]
        (folder / f"{split}.de").write_text("".join(" ".join(p) + "\n" for p in pairs), encoding="utf-8")
        (folder / f"{split}.en").write_text(
            "".join(" ".join(w.upper() for w in reversed(p)) + "\n" for p in pairs), encoding="utf-8"
        )


def binarise(folder: Path) -> Path:
    """fairseq-preprocess of `write_corpus`'s files; the data-bin folder."""
    write_corpus(folder)
    data = folder / "data-bin"
    prefixes = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    run("preprocess", "--source-lang=de", "--target-lang=en", *prefixes, f"--destdir={data}", "--workers=1")
    return data
