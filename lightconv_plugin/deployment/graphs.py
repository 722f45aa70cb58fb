"""The two graphs for decoding, made by torch.export; their inputs and outputs are tensors only.

    start(source) → state                     encoder-decoder; source (B,S)
    start(text) → state                       language model; text (B,S): the tokens before the first step's token
    step(token, *state) → scores, *changed    token (B,), scores (B,V)

All tensors, including the inputs, are contiguous. Row n of each state tensor belongs to sentence n: a beam search
reorders it by `index_select(0, order)`. `changed` replaces the first tensors of the state; the others do not change.

The state has, for convolutions, the last K − 1 inputs (zeros before the first token); for window attention, the last
K − 1 keys and values; for other attention, the keys and values of all tokens, in growing tensors. Convolutions of
attention's queries, keys and values also keep their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightconv_plugin.deployment.aten import decompositions
from lightconv_plugin.modules import DecoderState, EncoderDecoder, LanguageModel
from lightconv_plugin.modules.layer import Source

PlainModel = EncoderDecoder | LanguageModel
# Sizes for tracing the graphs, which become symbolic; 0 and 1 would become constants.
_BATCH, _SOURCE, _SEEN = 3, 7, 5
# Of the symbolic sizes: torch 2.6 traces no size without a limit that a view may reach.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state.

    name: what it holds, such as "mixers.2.keys".
    shape: its sizes; "batch", "source" (tokens of the source) and "seen" (1 + tokens read) depend on the call.
    dtype: torch's name, such as "float32".
    changes: whether a step returns a new one.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    changes: bool = True

    def empty(
        self, batch: int, source: int = _SOURCE, seen: int = 1, *, device: torch.device | str | None = None
    ) -> Tensor:
        """The tensor before the first token: zeros, except for key pads, which are ones since there are no keys yet."""
        sizes = {"batch": batch, "source": source, "seen": seen}
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        fill = torch.ones if self.name.endswith(".pads") else torch.zeros
        return fill(shape, dtype=getattr(torch, self.dtype), device=device)


def state_tensors(model: PlainModel) -> tuple[StateTensor, ...]:
    """The state tensors of a model's graphs, in order; those that change come first."""
    stack = model.config.decoder
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    tensors = [StateTensor("seen", ("batch",), "int64")]
    for i, mixer in enumerate(stack.mixers):
        for part, sizes in mixer.step_state(stack.embed_dim).items():
            tensors.append(StateTensor(f"mixers.{i}.{part}", sizes, "bool" if part == "pads" else dtype))
    if stack.kept_queries:
        queries = ("batch", stack.kept_queries, stack.embed_dim)
        tensors += [StateTensor(f"queries.{i}", queries, dtype) for i in range(len(stack.mixers))]
    if stack.encoder_dim is not None:
        shape = ("batch", stack.num_heads, "source", stack.embed_dim // stack.num_heads)
        for i in range(len(stack.mixers)):
            tensors += [StateTensor(f"sources.{i}.{part}", shape, dtype, changes=False) for part in ("keys", "values")]
        tensors.append(StateTensor("sources.pads", ("batch", "source"), "bool", changes=False))
    return tuple(tensors)


def _turned(name: str, part: Tensor) -> Tensor:
    """The tensor of this name with the batch first, given the mixer's own form of it, and the other way around."""
    return part.transpose(0, 1) if name.endswith("inputs") else part


class _Graph(nn.Module):
    """The decoder with its state as a list of tensors."""

    def __init__(self, model: PlainModel):
        super().__init__()
        self.model = model
        self.tensors = state_tensors(model)

    def _empty(self, batch: Tensor) -> list[Tensor]:
        """The changing part of the state before the first token; `batch` has one row per sentence."""
        return [t.empty(batch.shape[0], device=batch.device) for t in self.tensors if t.changes]

    def _nested(self, state: Sequence[Tensor]) -> DecoderState:
        """The state in the decoder's own form."""
        by_name = dict(zip((tensor.name for tensor in self.tensors), state, strict=False))
        stack = self.model.config.decoder
        mixers: list[Any] = []
        for i, mixer in enumerate(stack.mixers):
            parts = [_turned(part, by_name[f"mixers.{i}.{part}"]) for part in mixer.step_state(stack.embed_dim)]
            mixers.append(None if not parts else tuple(parts) if mixer.attends else parts[0])
        sources: list[Source | None] = [None] * len(mixers)
        if stack.encoder_dim is not None and "sources.pads" in by_name:
            sources = [
                Source(by_name[f"sources.{i}.keys"], by_name[f"sources.{i}.values"], by_name["sources.pads"])
                for i in range(len(mixers))
            ]
        queries: list[Tensor | None] = [None] * len(mixers)
        if stack.kept_queries:
            queries = [by_name[f"queries.{i}"].transpose(0, 1) for i in range(len(mixers))]
        return DecoderState(by_name["seen"], mixers, sources, queries)

    def _changed(self, state: DecoderState) -> list[Tensor]:
        """The changing part of the state as a list."""
        stack, tensors = self.model.config.decoder, [state.seen]
        for mixer, kept in zip(stack.mixers, state.mixers, strict=True):
            if names := mixer.step_state(stack.embed_dim):
                parts = kept if mixer.attends else (kept,)
                tensors += [_turned(name, part) for name, part in zip(names, parts, strict=True)]
        tensors += [inputs.transpose(0, 1) for inputs in state.queries if inputs is not None]
        return _contiguous(tensors)


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make tensors contiguous: a compiled step assumes contiguous inputs without checking."""
    return [tensor.contiguous() for tensor in tensors]


class _Start(_Graph):
    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        state = self._empty(tokens)
        if isinstance(self.model, LanguageModel):
            _, after = self.model.decoder.step(tokens, self._nested(state))
            return tuple(self._changed(after))
        encoded = self.model.encode(tokens)
        sources = [layer.source(encoded) for layer in self.model.decoder.layers]
        constant = [part for source in sources if source is not None for part in (source.keys, source.values)]
        return (*state, *_contiguous(constant), *([encoded.pads] if constant else []))


class _Step(_Graph):
    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        scores, after = self.model.step(token.unsqueeze(1), self._nested(state))
        return (scores.squeeze(1), *self._changed(after))


@torch.no_grad()
def export_start(model: PlainModel) -> ExportedProgram:
    """The graph `start` of a model in evaluation mode, for any batch and length.

    It uses only torch's own operators.
    """
    tokens = torch.full((_BATCH, _SOURCE), model.config.unk, device=_device(model))
    stack = model.config.encoder or model.config.decoder
    longest = stack.max_positions if stack.positions == "learned" else _LARGEST
    return _export(_Start(model), (tokens,), ({0: Dim("batch", max=_LARGEST), 1: Dim("source", max=longest)},))


@torch.no_grad()
def export_step(model: PlainModel) -> ExportedProgram:
    """The graph `step` of a model in evaluation mode, for any batch and length.

    It uses only torch's own operators.
    """
    graph, device = _Step(model), _device(model)
    state = tuple(tensor.empty(_BATCH, seen=_SEEN, device=device) for tensor in graph.tensors)
    dims = {name: Dim(name, max=_LARGEST) for name in ("batch", "source", "seen")}
    shapes = tuple(
        {i: dims[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)} for tensor in graph.tensors
    )
    token = torch.full((_BATCH,), model.config.unk, device=device)
    return _export(graph, (token, *state), ({0: dims["batch"]}, shapes))


def _device(model: PlainModel) -> torch.device:
    return next(model.parameters()).device


def _export(graph: _Graph, arguments: tuple[Tensor, ...], shapes: tuple) -> ExportedProgram:
    if graph.model.training:
        raise ValueError("model must be in evaluation mode: call model.eval() first")
    return torch.export.export(graph.eval(), arguments, dynamic_shapes=shapes).run_decompositions(decompositions())
