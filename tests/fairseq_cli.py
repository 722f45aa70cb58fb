"""fairseq's commands as a user types them, on a corpus of a few dozen lines; shared by the tests that need them.

Importing fairseq takes five seconds of processor time, most of what a small command takes. A server that has imported
it (and torch, but not the plugin) forks a process for each command, in which the command starts as it does in a new
one.
"""

import importlib
import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path

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


def run_module(module: str, arguments=(), stdin: str | None = None, cwd=None, **environment) -> tuple[int, str, str]:
    """`python -m module arguments`, forked from the server: (exit status, standard output, standard error)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fairseq_imported"])
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")]
        Path(files[0]).write_text(stdin or "", encoding="utf-8")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        call = (files, variables, str(cwd or os.getcwd()), module, [str(argument) for argument in arguments])
        process = context.Process(target=_command, args=call, daemon=False)
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = (Path(file).read_text(encoding="utf-8", errors="replace") for file in files[1:])
        return process.exitcode, out, err


def _command(files: list[str], variables: dict[str, str], cwd: str, module: str, arguments: list[str]) -> None:
    """In the forked process: take the files for the standard streams, and run the module as the main program."""
    import runpy

    for number, file in enumerate(files):
        descriptor = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (multiprocessing closed that of the process)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    importlib.invalidate_caches()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def write_corpus(folder: Path, lines: int = 60) -> None:
    """train/valid/test.{de,en}: short sentences of a dozen words; the English is the German reversed."""
    words = "ich du er sieht hört den Hund die Katze das Haus nicht oft".split()
    generator = random.Random(3)
    for split, n in ("train", lines), ("valid", 12), ("test", 12):
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
