"""Small trainings by fairseq's own commands, with and without a patch. GPUs are hidden from all of them."""

import importlib.metadata
import re
from collections.abc import Callable

import pytest

from lightconv_plugin import compat
from tests.fairseq_cli import USER_DIR, logged, run

PLUGIN = ["--user-dir", str(USER_DIR)]
RECIPE = "--optimizer adam --lr 0.01 --max-tokens 100 --num-workers 0 --log-format json --log-interval 1".split()
TRANSFORMER = (
    "--arch transformer --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-layers 1"
    " --encoder-attention-heads 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1"
    " --decoder-attention-heads 2 --dropout 0 --no-epoch-checkpoints"
).split()
LANGUAGE_MODEL = (
    "--task language_modeling --tokens-per-sample 20 --sample-break-mode eos --arch transformer_lm"
    " --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-attention-heads 2"
).split()
BLEU = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 12}']
TWO = ["--distributed-world-size", 2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def train(data, save_dir, *options, **environment) -> str:
    return run(
        "train", data, *PLUGIN, *TRANSFORMER, *RECIPE, "--save-dir", save_dir, *options, **NO_GPU, **environment
    )  # fmt: skip


def losses(log: str) -> dict[int, float]:
    """Update number -> training loss."""
    return {int(line["num_updates"]): float(line["loss"]) for line in logged(log)}


def is_applied(name: str) -> bool:
    assert name in compat.PATCHES
    return name in {patch.name for patch in compat.applied()}


def check_needed(name: str, message: str, command: Callable[..., str]) -> None:
    """`command(environment)` without the patch: fails with `message`, or works where the patch was not applied."""
    if is_applied(name):
        assert re.search(message, command(LIGHTCONV_SKIP_PATCHES=name, fails=True))
        return
    command(LIGHTCONV_SKIP_PATCHES=name)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    pytest.skip(f"works unpatched, and was left alone: {versions}")


def unpatched(function: Callable) -> Callable:
    """fairseq's own function, which its replacement calls."""
    [original] = [cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents)]
    return original
