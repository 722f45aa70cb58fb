"""The largest batch of a training that fits into the memory of a device, found by trials of real updates.

A recipe states the tokens of an update: max_tokens × update_freq. The papers' max_tokens suited the GPUs of 2018; a
larger one spends most of its time on starting kernels. Larger batches, and fewer of them in an update, are the same
training, except for rounding and for the sentences that share an update.
"""

from __future__ import annotations

import bisect
import json
import math
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import write_text
from lightconv_plugin.processes import module_command
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.training.batch import Batch
from lightconv_plugin.recipes.training.launch import hydra_config
from lightconv_plugin.recipes.training.overrides import quote

FILE = "micro_batch.json"
MOST = 32_768  # tokens; nothing larger has been timed
PART = 0.9  # of the free memory: a batch that was not tried may need more, and memory becomes fragmented


@dataclass(frozen=True)
class Trial:
    """What trials found: a device, its memory in bytes, a digest of the training, and the largest batch's tokens."""

    device: str
    memory: int
    training: str
    max_tokens: int


def sizes_of(batch: Batch) -> list[int]:
    """Sizes that divide an update into equal batches, from the recipe's to the largest, a tenth or more apart."""
    sizes = [min(batch.most, batch.share)]
    for parts in range(batch.share // sizes[0], 0, -1):
        size = math.ceil(batch.share / parts)  # rounded down, the batches would be one more
        if batch.divides(parts) and 1.1 * sizes[-1] <= size <= MOST // batch.sample:
            sizes.append(size)
    return [size * batch.sample for size in sizes]


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of these ascending sizes that fits, found by bisection; the first is taken to fit."""
    return sizes[bisect.bisect_left(sizes[1:], True, key=lambda size: not fits(size))]


def fitting(config: Path, batch: Batch, save_dir: Path, overrides: Sequence[str]) -> int:
    """max_tokens for the first device of this machine; a process of its own tries the sizes.

    `save_dir`/micro_batch.json keeps what was found. A training that is resumed on the same device does not try again,
    unless something else that takes memory is another (trial.digest).

    Args:
        overrides: those of the training, with absolute paths

    Raises:
        InputError: an update failed for another reason than its memory; the message has the end of the output.
    """
    sizes = sizes_of(batch)
    if len(sizes) == 1:
        return sizes[0]
    kept, asked = save_dir / FILE, {**asdict(batch), "ratios": list(batch.ratios)}
    with tempfile.TemporaryDirectory(prefix="trial.") as name:
        folder = Path(name)
        found = hydra_config(config, folder)
        request = {"processes": batch.processes, "sizes": sizes, "earlier": _earlier(kept, asked)}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        say(f"trying which batches fit into memory, from {sizes[0]} to {sizes[-1]} tokens")
        command = [*module_command("lightconv_plugin.recipes.training.trial"), name]
        command += ["--config-dir", str(found.parent), "--config-name", found.stem]
        command += [f"hydra.run.dir={quote(folder / 'run')}", *overrides]
        command.append("distributed_training.distributed_world_size=1")  # fairseq's default: one for each GPU
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        result = folder / "trial.json"
        if done.returncode or not result.is_file():
            how = "was killed, perhaps for memory" if done.returncode == -signal.SIGKILL else "failed"
            raise InputError(
                f"the trial of batches {how}; with `micro_batch` N there is none:\n"
                + "\n".join(done.stderr.splitlines()[-12:])
            )
        trial = Trial(**json.loads(result.read_text(encoding="utf-8")))
    save_dir.mkdir(parents=True, exist_ok=True)
    write_text(kept, json.dumps({"batch": asked, "trial": asdict(trial)}, indent=1) + "\n")
    say(f"batches of {trial.max_tokens} tokens fit into the {trial.memory / 2**30:.1f} GiB of {trial.device}")
    return trial.max_tokens


def _earlier(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What trials of the same batches found earlier."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return asdict(Trial(**stored["trial"])) if stored["batch"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or not ours: the trials are repeated
        return None
