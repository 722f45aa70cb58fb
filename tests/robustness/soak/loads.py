"""What runs long: operator calls, a training by fairseq, translations. Each samples its memory as it goes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import torch

from lightconv_plugin import ops
from tests.ops.operators import random_call
from tests.robustness.soak.memory import Memory

# How often a run is sampled.
SAMPLES = 200


def operators(calls: int, seed: int = 0) -> Memory:
    """Forward and backward passes and steps of all operators, of ever other sizes, types and options."""
    memory, rng = Memory(), random.Random(seed)
    for number in range(calls):
        _call(rng)
        if number % max(calls // SAMPLES, 1) == 0:
            memory.sample()
    return memory


def _call(rng: random.Random) -> None:
    kind = rng.choice(("lightconv-glu", "dynamicconv-glu", "talkconv"))
    steps, batch = rng.randint(1, 200), rng.randint(1, 6)
    heads, per_head = rng.choice((1, 2, 4)), rng.choice((1, 3, 16, 40))
    dtype, seed = rng.choice((torch.float32, torch.bfloat16, torch.float16)), rng.randrange(1000)
    left, right = rng.choice((0, 3, 31)), rng.choice((0, 3, 31))
    call = random_call(kind, steps, batch, heads, per_head, left, right, dtype=dtype, seed=seed)
    options = {}
    if kind != "talkconv":
        options = {"dropout": rng.choice((0.0, 0.1)), "normalize": rng.choice(ops.NORMALIZATIONS)}
    out, step = call(lengths=torch.full((batch,), steps // 2), **options), call.step(**options)
    inputs = [*call.given.values()]
    torch.autograd.grad([out, *step], inputs, [torch.ones_like(tensor) for tensor in (out, *step)])


def training(updates: int, folder: Path) -> Memory:
    """fairseq-train of a DynamicConv of two layers on a corpus of a few dozen lines, its memory seen from outside.

    Raises:
        RuntimeError: it failed.
    """
    from tests import fairseq_cli

    data = folder / "data-bin"
    if not data.is_dir():
        fairseq_cli.binarise(folder)
    # No more than about as many lines of the log as samples, and no checkpoints: they are written elsewhere.
    interval = max(updates // SAMPLES, 1)
    command = [sys.executable, "-m", "fairseq_cli.train", str(data), "--user-dir", str(fairseq_cli.USER_DIR)]
    command += ["--arch", "dynamicconv_iwslt_de_en", *fairseq_cli.SIZE, *fairseq_cli.RECIPE]
    command += ["--max-update", str(updates)]
    command += ["--log-interval", str(interval), "--no-save", "--disable-validation", "--dropout", "0.1"]
    log = folder / "train.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder)
        memory, done = Memory(process.pid), 0
        for line in process.stdout:
            if found := re.search(r'"num_updates": "(\d+)"', line):
                done = int(found[1])
                memory.sample()
        status = process.wait()
    if status != 0 or done < updates - interval:
        raise RuntimeError(f"fairseq-train ended with {status} after {done} updates: {log.read_text()[-2000:]}")
    return memory


def translation(lines: int, folder: Path) -> Memory:
    """So many lines by one Translator, some at a time: sentences of all lengths, empty lines, what is not text."""
    from lightconv_plugin.generation import Translator
    from tests.generation import translation_toys as toys

    checkpoint = folder / "model.pt"
    if not checkpoint.is_file():
        toys.make_checkpoint(checkpoint, toys.make_corpus(folder / "corpus"), seed=1)
    memory, done = Memory(), 0
    batch = min(500, lines // 20)
    with Translator(checkpoint, beam=2, max_len_b=12, threads=2) as translator:
        while done < lines:
            count = min(batch, lines - done)
            given = [*toys.lines(count - 2, seed=done), "", b"\xff"] if count > 2 else [""] * count
            results = translator.translate(given)
            answered = [found.text or found.problem or not found.source for found in results]
            if len(answered) != count or not all(answered):
                raise AssertionError(f"lines {done} to {done + count}: not all were translated")
            done += count
            memory.sample()
    return memory
