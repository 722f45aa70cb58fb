"""Launches, bytes and operations of a training step and of a decoding step on a GPU, counted without one.

    python -m benchmarks.counting                           # wmt_en_de_big, bfloat16, a table
    python -m benchmarks.counting --json benchmarks/results/counted_steps.json

A training step is fairseq's Trainer's: forward, loss, backward, update, of each system of benchmarks/training.py, and
of fairseq's Transformer without the plugin's patches. For ours and that Transformer, what remains outside CUDA graphs
is counted too. Its layers are counted alone too, forward and backward. A
decoding step is one of our search in torch with beam 4. How it is counted, and what that leaves out, is in launches.py.
Waits are the places where the host waits for the device.

The table adds up how long the step takes if nothing overlaps: matrix products, attention and our convolutions at the
rate of a product (or all their bytes at the rate of a copy, if that takes longer), the bytes of all other operators at
the rate of a copy (both measured on an H100, benchmarks/results/gpu_timing.json), and 10 µs of the host for each
launch, which is a scale: hosts differ, and their time is hidden while the device is busy.
"""

from __future__ import annotations

import collections
import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks import machine, report, tables_counted
from benchmarks.launches import Counter, Counts, as_on_cuda

HOST_SECONDS = 10e-6
BATCHES = {3584: (128, 28), 16384: (512, 32)}
_LAYER_STEPS = 28
# The patches that make a training step faster and change nothing else. That of the norm stays: without a GPU fairseq
# would copy each parameter's norm to the CPU.
FASTER = (
    *("adam_launches", "gradient_clipping_launches", "half_precision_launches"),
    *("label_smoothing_passes", "reads_after_the_norm", "residuals_in_one_pass"),
)
_BEAM, _SENTENCES, _SOURCE, _STEPS = 4, 256, 32, 13  # the thirteenth step of 256 sentences


def main(arguments: list[str] | None = None) -> None:
    """Count, print the tables and write the JSON."""
    parser = machine.parser("counting", __doc__)
    options = parser.parse_args(arguments)
    machine.prepare(options)
    # Imported late, since it takes seconds and wrong options should be reported at once.
    from benchmarks import systems

    content: dict[str, Any] = {
        "benchmark": "counting",
        "machine": {"commit": machine.describe(torch.device("cpu"))["commit"], "versions": versions()},
        "preset": "wmt_en_de_big",
        "dtype": "bfloat16",
        "quick": options.quick,
        "host_s_per_launch": HOST_SECONDS,
        "rates": json.loads((machine.ROOT / "benchmarks/results/gpu_timing.json").read_text())["results"]["main"][
            "rates"
        ],
        "steps": {system: count_system(system, options.quick) for system in systems.SYSTEMS},
    }
    if not options.quick:
        content["steps"][f"{systems.TRANSFORMER} alone"] = _without_patches(systems.TRANSFORMER)
    print(f"{tables_counted.training(content).markdown()}\n{tables_counted.single(content).markdown()}")
    if options.json:
        tiny = content["steps"] if options.quick else {name: count_system(name, quick=True) for name in systems.SYSTEMS}
        report.write_json(options.json, content | {"tiny": _totals(tiny)})


def _without_patches(system: str) -> dict[str, Any]:
    """What a system needs when nothing that makes training faster is changed in fairseq; patches are made at import."""
    call = f"from benchmarks import counting; import json; print(json.dumps(counting.count_system({system!r})))"
    environment = os.environ | {"LIGHTCONV_SKIP_PATCHES": ",".join(FASTER)}
    run = subprocess.run(
        [sys.executable, "-c", call], cwd=machine.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(run.stdout)


def _totals(steps: dict[str, Any]) -> dict[str, Any]:
    """Without the single operators."""
    if not isinstance(steps, dict):
        return steps
    return {name: _totals(counts) for name, counts in steps.items() if name != "operators"}


def versions() -> dict[str, str]:
    """What decides which operators are called, besides this package."""
    import fairseq

    return {"torch": torch.__version__.partition("+")[0], "fairseq": fairseq.__version__}


def count_system(system: str, quick: bool = False) -> dict[str, Any]:
    """What the steps of a system need, by step; `quick` makes the model and the batch tiny, as "tiny" in the JSON."""
    from benchmarks import systems

    preset = systems.sized(systems.PRESETS["wmt_en_de_big"], quick, None, None)
    task = systems.task(systems.dictionary(preset.vocabulary))
    model = systems.build(system, preset, task, tiny=quick)
    result: dict[str, Any] = {"parameters": systems.parameters(model)}
    sizes = {24: (4, 6)} if quick else BATCHES
    with as_on_cuda():
        decoded = _decoding_step(copy.deepcopy(model))
        step = _training_step(model, task)
        for tokens, (sentences, length) in sizes.items():
            sized = systems.sized(systems.PRESETS["wmt_en_de_big"], False, sentences, length)
            (batch,) = systems.random_batches(sized, task.target_dictionary, 1)
            result[f"training, {tokens} tokens"] = step(on_meta(batch))
        if system in systems.WITH_GRAPHS:
            result["repeated graph"] = _repeated_graph(step, on_meta(batch))
        result |= _layers(model)
    return result | {"decoding": decoded}


def on_meta(thing: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, thing)


def _training_step(model: torch.nn.Module, task: Any) -> Callable[[dict], dict]:
    """A function that counts an update with a batch, in bfloat16."""
    from benchmarks import trainers

    trainer = trainers.trainer(model, task, torch.device("cpu"), "bfloat16")
    trainer._model.to("meta")
    trainer.device = torch.device("meta")
    trainer.optimizer  # noqa: B018 (fairseq makes it when it is first asked for)

    def step(batch: dict) -> dict:
        with Counter():
            trainer.train_step([batch])  # makes what later updates find
        backward = trainer.optimizer.backward

        def marked(loss: Tensor) -> None:
            counter.begin("backward")
            backward(loss)
            counter.begin("update")

        with Counter() as counter, mock.patch.object(trainer.optimizer, "backward", marked):
            counter.begin("forward")
            trainer.train_step([batch])
        return _summary(counter.parts)

    return step


def _repeated_graph(step: Callable[[dict], dict], batch: dict) -> dict[str, Any]:
    """What remains in an update whose forward and backward pass were recorded (LIGHTCONV_GRAPHS=1)."""
    from benchmarks import trainers
    from lightconv_plugin.compat import step_graphs

    with mock.patch.object(step_graphs, "CudaGraphs", lambda device: _OneLaunch()), trainers.in_graphs():
        step(batch)
        return step(batch)


class _OneLaunch:
    """Stands in for CUDA graphs: to repeat a recording is one launch, which reads and writes a number."""

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return functools.partial(torch.zeros((), device="meta").add_, 1)


def _layers(model: torch.nn.Module) -> dict[str, Any]:
    """A layer of each side alone, forward and backward, for sentences of equal length."""
    x = torch.zeros(_LAYER_STEPS, 8, model.encoder.embed_tokens.embedding_dim, device="meta", dtype=torch.bfloat16)
    pads = torch.zeros(8, _LAYER_STEPS, dtype=torch.bool, device="meta")
    mask = {"self_attn_mask": torch.zeros(_LAYER_STEPS, _LAYER_STEPS, device="meta", dtype=torch.bfloat16)}
    encoder, decoder = model.encoder.layers[-1], model.decoder.layers[-1]
    masks = mask if hasattr(decoder, "self_attn") else {}  # not in fairseq's own convolutional layers
    calls = {
        "encoder layer": lambda x: encoder(x, encoder_padding_mask=pads),
        "decoder layer": lambda x: decoder(x, encoded, pads, None, **masks)[0],
    }
    encoded = x.clone().requires_grad_()
    result = {}
    for name, call in calls.items():
        model.zero_grad(set_to_none=True)
        out_grad = torch.empty_like(x)
        with Counter() as counter:
            call(x.detach().requires_grad_()).backward(out_grad)
        result[name] = _summary({"": counter.counts})
    return result


def _decoding_step(model: torch.nn.Module) -> dict[str, Any] | None:
    """One step of the search in torch, in the middle of a translation; None for fairseq's own convolutions."""
    from lightconv_plugin.errors import UnsupportedModelError
    from lightconv_plugin.generation.beam_search import Search, SearchOptions
    from lightconv_plugin.generation.steps import StepModel
    from lightconv_plugin.models.plain import plain_encoder_decoder

    try:
        plain = plain_encoder_decoder(model)
    except UnsupportedModelError:
        return None
    plain = plain.eval().to("meta", torch.bfloat16)
    steps = StepModel(plain)
    source = torch.ones(_SENTENCES, _SOURCE, dtype=torch.int64, device="meta")
    encoded = torch.zeros(_SOURCE, _SENTENCES, plain.config.encoder.embed_dim, dtype=torch.bfloat16, device="meta")
    steps.encoder = lambda source: (encoded, source.eq(1))  # its sizes depend on how many pads there are
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=_BEAM)
    state = steps.start(source, _BEAM, 2 * _SOURCE)
    search = Search([steps], [state], source[:, 0], options, 2 * _SOURCE - 1)
    for time in range(_STEPS):
        steps.advance(state, _SENTENCES * (1 if time == 0 else _BEAM))
        with Counter() as counter, torch.no_grad():
            search._step(search._kind(time))
    return _summary({"": counter.counts})


def _summary(parts: dict[str, Counts]) -> dict[str, Any]:
    """The counts as they are stored; `operators` has the launches and the bytes of each."""
    launches = sum((counts.launches for counts in parts.values()), start=collections.Counter())
    moved = sum((counts.bytes for counts in parts.values()), start=collections.Counter())
    return {
        "launches": {part: counts.launches.total() for part, counts in parts.items()},
        "bytes": {part: counts.bytes.total() for part, counts in parts.items()},
        "product_bytes": sum(counts.product_bytes for counts in parts.values()),
        "flops": sum(counts.flops for counts in parts.values()),
        "waits": [place for counts in parts.values() for place in counts.waits],
        "operators": {name: [count, moved[name]] for name, count in launches.most_common()},
    }


if __name__ == "__main__":
    sys.exit(report.run(main))
