"""Training steps as CUDA graphs: forward pass, loss and backward pass of a batch are launched at once.

A step of a small batch is several hundred kernels of a few microseconds, and launching them takes the host longer than
running them takes the GPU. A graph launches all of them at once, but it repeats the same operations at the same
addresses, for a batch of the same size:

- Batches are rounded up, in sentences and in length, so that there are few sizes. What is added has no loss and no
  gradient: pads, and copies of the last sentence whose targets are pads.
- Gradients stay in place from one update to the next. The update itself is not part of the graph.
- The first step of a size runs normally, the second is recorded, and the others repeat the recording. When there are
  as many sizes as are kept, batches of other sizes are computed normally, one operation at a time.
- Recordings keep the memory of the largest step, which no other batch can use. Where a batch that is computed normally
  does not fit beside them, there are none from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import (
    TransformerDecoder,
    TransformerDecoderBase,
    TransformerEncoder,
    TransformerEncoderBase,
)
from fairseq.modules import quant_noise, quantization
from fairseq.optim.amp_optimizer import AMPOptimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightconv_plugin.errors import InputError
from lightconv_plugin.models.encoder_decoder import MixerEncoder
from lightconv_plugin.modules.recorder import Recorder, Step

logger = logging.getLogger(__name__)

SIZES = 64
_BATCH = {"id", "nsentences", "ntokens", "net_input", "target"}
_INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}


def rounded(size: int) -> int:
    """The next multiple of 8, from 64 on of an eighth of the next power of two: 72 → 80, 150 → 160, 300 → 320."""
    unit = max(8, (1 << (size - 1).bit_length()) // 8)
    return -(-size // unit) * unit


class StepGraphs:
    """Computes losses and gradients of a model's batches with recorded steps.

    Args:
        model: its weights must stay at the same addresses, and its forward pass must neither wait for the device nor
            decide by numbers of Python that change from step to step.
        criterion: one that logs nothing but tensors and the numbers of tokens and sentences, and whose sample size is
            one of these: that of sentences with sentence_avg.
        recorder: CudaGraphs, or a replacement for it.
        pad: the dictionary's index of padding.
        left_pad_source, left_pad_target: pads of source or target sentences are on their left.
        sizes: number of sizes for which steps are recorded.

    Raises:
        InputError: the model drops layers at random or quantises its weights, which a recording cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        recorder: Recorder,
        pad: int,
        left_pad_source: bool = False,
        left_pad_target: bool = False,
        sizes: int = SIZES,
    ):
        for module in model.modules():
            if getattr(module, "encoder_layerdrop", 0) or getattr(module, "decoder_layerdrop", 0):
                raise InputError("CUDA graphs: a model with LayerDrop needs other operations in every step")
            if _quantised(module):
                raise InputError("CUDA graphs: quantisation and its noise replace weights between steps")
        never_wait(model)
        self._model, self._criterion, self._recorder = model, criterion, recorder
        self._pad, self._left_pad, self._sizes = pad, (left_pad_source, left_pad_target), sizes
        self._recorded: dict[tuple[int, ...], _Size] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def step(self, sample: Mapping[str, Any], optimizer: Any) -> tuple[Tensor, Any, dict[str, Any]] | None:
        """Add the gradients of a batch to the parameters' `grad`.

        None, and nothing is added, for a size too many or if there is too little memory.

        Args:
            sample: fairseq's batch, on the model's device.
            optimizer: fairseq's, whose loss scale the gradients have.

        Returns:
            As the criterion: the loss, the sample size, and what is logged.

        Raises:
            InputError: the batch, the criterion, the optimizer or the model is of a kind that cannot be recorded.
        """
        if isinstance(optimizer, AMPOptimizer):
            raise InputError("CUDA graphs: --amp decides in every step what is computed in which type; use --bf16")
        wanted = self._padded(sample)
        size = tuple(wanted["net_input"]["src_tokens"].shape)
        kept = self._recorded.get(size)
        if kept is None:
            if len(self._recorded) >= self._sizes:
                return None
            kept = self._recorded[size] = _Size(wanted)
        else:
            kept.copy_(wanted)
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            kept.scale_by(float(scaler.loss_scale))
        self._place_gradients()
        try:
            self._run(kept)
        except torch.OutOfMemoryError:
            self.stop()
            return None
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._gradients.setdefault(parameter, parameter.grad)
        if hasattr(optimizer, "_needs_sync"):  # what fairseq's backward does beside it
            optimizer._needs_sync = True
        return self._results(kept, sample)

    def stop(self) -> None:
        """Drop all recordings, for their memory, and record nothing from now on."""
        if self._sizes:
            logger.warning("CUDA graphs: too little memory for recordings: from now on no training step is recorded")
        self._sizes = 0
        self._recorded.clear()
        self._gradients.clear()

    def _padded(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        inputs, target = sample["net_input"], sample["target"]
        if unknown := (sample.keys() - _BATCH) | (inputs.keys() - _INPUTS):
            raise InputError(
                f"CUDA graphs: the task's batches have {', '.join(sorted(unknown))}, which is not supported"
            )
        both = "prev_output_tokens" in inputs
        sentences, length = rounded(len(target)), rounded(max(target.shape[1], inputs["src_tokens"].shape[1]))
        # A language model's source is its target, shifted.
        source_left, target_left = self._left_pad if both else (self._left_pad[1],) * 2

        def longer(tokens: Tensor, left: bool) -> Tensor:
            missing = length - tokens.shape[1]
            return F.pad(tokens, (missing, 0) if left else (0, missing), value=self._pad)

        padded = {"src_tokens": _more_rows(longer(inputs["src_tokens"], source_left), sentences)}
        if both:
            padded["prev_output_tokens"] = _more_rows(longer(inputs["prev_output_tokens"], target_left), sentences)
        if inputs.get("src_lengths") is not None:
            padded["src_lengths"] = _more_rows(inputs["src_lengths"], sentences)
        targets = F.pad(longer(target, target_left), (0, 0, 0, sentences - len(target)), value=self._pad)
        return {**sample, "net_input": padded, "target": targets}

    def _place_gradients(self) -> None:
        """Gradients are added up where they were in former steps; fairseq replaces them by None between updates."""
        cleared = []
        for parameter, place in self._gradients.items():
            if parameter.grad is None:
                cleared.append(place)
            elif parameter.grad is not place:  # of a batch that was computed normally
                place.copy_(parameter.grad)
            parameter.grad = place
        if cleared:
            torch._foreach_zero_(cleared)

    def _run(self, size: _Size) -> None:
        def function() -> None:
            loss, sample_size, logged = self._criterion(self._model, size.given())
            self._check_sample_size(sample_size, size.sample)
            (loss if size.scale is None else loss * size.scale).backward()
            size.keep(loss, logged)

        if size.replay is not None:
            size.replay()
        elif not size.out:
            self._warm_up(function)
        else:
            try:
                with _Outside() as outside:
                    size.replay = self._recorder.record(function)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                names = f"{type(self._model).__name__} with {type(self._criterion).__name__}"
                raise InputError(f"CUDA graphs: a training step of {names} cannot be recorded: {error}") from error
            size.outside = outside.tensors

    def _warm_up(self, function: Step) -> None:
        """Run a step for the first time; without enough memory, the gradients stay as they were."""
        parameters = list(self._model.parameters())
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        try:
            self._recorder.warm_up(function)
        except torch.OutOfMemoryError:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def _check_sample_size(self, found: Any, sample: Mapping[str, Any]) -> None:
        """The number by which fairseq divides gradients is not in the recording: `_results` knows that of the batch."""
        what, known = "tokens", [sample["ntokens"]]
        if getattr(self._criterion, "sentence_avg", False):  # with or without those that are added
            what, known = "sentences", [sample["nsentences"], len(sample["target"])]
        if isinstance(found, Tensor) or found not in known:
            name, came = type(self._criterion).__name__, "a tensor" if isinstance(found, Tensor) else found
            raise InputError(
                f"CUDA graphs: the sample size of {name} must be the number of {what}, {known[0]}, got {came}"
            )

    def _results(self, size: _Size, sample: Mapping[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
        sentences, tokens = sample["target"].size(0), sample["ntokens"]
        sample_size = sentences if getattr(self._criterion, "sentence_avg", False) else tokens
        numbers = {"ntokens": tokens, "nsentences": sentences, "sample_size": sample_size}
        if unknown := size.numbers - numbers.keys():
            name = type(self._criterion).__name__
            raise InputError(f"CUDA graphs: {name} logs {', '.join(sorted(unknown))}, which is not in the recording")
        out = {name: value.clone() for name, value in size.out.items()}
        return out.pop(""), sample_size, out | {name: numbers[name] for name in size.numbers}


@dataclass(eq=False)
class _Size:
    """Batches of one size.

    sample: the batch that the operations read. out: the loss, with the name "", and the tensors that are logged.
    numbers: names of the other values that are logged. scale: of the loss, (). outside: the tensors that the recording
    reads or writes and does not make.
    """

    sample: dict[str, Any]
    out: dict[str, Tensor] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    scale: Tensor | None = None
    replay: Step | None = None
    outside: list[Tensor] = field(default_factory=list)

    def given(self) -> dict[str, Any]:
        """The batch for the criterion: some, such as fairseq's R-Drop, put other tensors into what they are given."""
        return {**self.sample, "net_input": dict(self.sample["net_input"])}

    def copy_(self, sample: Mapping[str, Any]) -> None:
        inputs = self.sample["net_input"] | {"target": self.sample["target"]}
        for name, tensor in (sample["net_input"] | {"target": sample["target"]}).items():
            inputs[name].copy_(tensor)

    def scale_by(self, factor: float) -> None:
        if self.scale is None:
            self.scale = self.sample["target"].new_empty((), dtype=torch.float32)
        self.scale.fill_(factor)

    @torch.no_grad()
    def keep(self, loss: Tensor, logged: Mapping[str, Any]) -> None:
        """Copy the results to where they stay."""
        tensors = {"": loss} | {name: value for name, value in logged.items() if isinstance(value, Tensor)}
        if not self.out:
            self.out = {name: torch.empty_like(value) for name, value in tensors.items()}
            self.numbers = set(logged) - tensors.keys()
        for name, value in tensors.items():
            self.out[name].copy_(value)


def _quantised(module: nn.Module) -> bool:
    """Whether fairseq's quantisation has replaced this layer, or its noise replaces the layer's weights."""
    return type(module).__module__.startswith(quantization.__name__) or any(
        hook.__module__ == quant_noise.__name__ for hook in module._forward_pre_hooks.values()
    )


class _Outside(TorchDispatchMode):
    """Notes the tensors that operations use and do not make. A recording uses their memory, and nothing else might
    keep it: modules replace tensors that they have computed once, such as masks, by larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._noted: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._noted.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and _address(leaf) not in self._made:
                self._noted.setdefault(_address(leaf), leaf)
        out = function(*args, **kwargs)
        self._made |= {_address(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)} - self._noted.keys()
        return out


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _more_rows(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])])


def never_wait(model: nn.Module) -> None:
    """Change fairseq's Transformers, in place, not to ask the device whether a batch has pads. The results stay."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) in (TransformerEncoderBase, TransformerEncoder):
            module.forward_scriptable = MethodType(MixerEncoder.forward_scriptable, module)
        elif type(module) in (TransformerDecoderBase, TransformerDecoder):
            module.cross_self_attention = True  # see MixerDecoder
