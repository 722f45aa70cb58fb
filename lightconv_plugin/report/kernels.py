"""The token mixers of a trained model: the filters, windows and attention of each layer and head.

Learned filters are read from the parameters. Those that depend on the text are gathered by hooks on the mixers while
the model reads sentences, one at a time and in evaluation mode; the model itself is not changed.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.ops.filters import Filter
from lightconv_plugin.ops.normalize import normalize

# Relative positions for which mean attention is shown: (before, after) in an encoder; a decoder sees nothing after.
ATTENTION_REACH = (20, 20)
# How many positions of a sentence can be drawn with their tokens.
LONGEST_SHOWN = 26
# Mixers whose kernels are parameters; the kernels of all others depend on the text.
FIXED = [name for name, kind in MIXERS.items() if kind.fixed]


@dataclass
class Layer:
    """One layer's mixer with H rows (heads, or what `rows` names).

    side: "encoder" or "decoder"; number: from 0. kind: a name of modules.mixers.MIXERS.
    positions: (P,) the relative positions s − t of `mean`'s columns.
    mean: (H,P) the filter, or its mean over all positions; None if it needs data that are missing.
    reach: for "talk", how many tokens each window reaches to the left and right: two (H,N) arrays for N positions.
    limits: for "talk", (L, R).
    outside: (H,) the share of attention beyond `positions`; None for other mixers.
    maps: (H,T,T) for each sentence shown: the weight with which position t (row) reads position s (column), for at
        most the first LONGEST_SHOWN positions.
    """

    side: str
    number: int
    kind: str
    rows: list[str]
    positions: np.ndarray
    mean: np.ndarray | None = None
    reach: tuple[np.ndarray, np.ndarray] | None = None
    limits: tuple[int, int] = (0, 0)
    outside: np.ndarray | None = None
    maps: list[np.ndarray] = field(default_factory=list)


class _Probe:
    """A forward hook on one mixer: `see` turns each call of `module` into rows of `layer`."""

    def __init__(self, layer: Layer, module: Any):
        self.layer, self.module, self.show, self.read = layer, module, False, 0

    def __call__(self, module, args, kwargs, output) -> None:
        query = args[0] if args else kwargs["query"]
        if query.shape[1] != 1:
            raise ValueError(f"kernels are gathered from one sentence at a time, got a batch of {query.shape[1]}")
        self.see(query)

    def see(self, query: Tensor) -> None:
        """Read what depends on the call's input (T,1,d); a filter that is a parameter does not."""

    def finish(self) -> None:
        if self.layer.mean is not None and self.read:
            self.layer.mean = self.layer.mean / self.read

    def keep(self, weights: Tensor) -> None:
        """Keep (H,T,T) for drawing; only the beginning if it is long."""
        self.layer.maps.append(weights[:, :LONGEST_SHOWN, :LONGEST_SHOWN].numpy())

    def add(self, total: Tensor, length: int) -> None:
        """Add the sum (H,P) over `length` positions to the mean."""
        before = 0 if self.layer.mean is None else self.layer.mean
        self.layer.mean = before + total.double().numpy()
        self.read += length


class _Fixed(_Probe):
    """A filter that is a parameter."""

    def finish(self) -> None:
        conv = self.module
        weight = conv.weight.detach().float()
        if self.layer.kind == "lightweight":
            self.layer.mean = normalize(weight.squeeze(1).t().contiguous(), conv.normalize).t().numpy()
        elif len(self.layer.rows) == 2:  # a gated full convolution: values, then gates
            self.layer.mean = np.stack([_tap_norms(half) for half in weight.chunk(2)])
        else:
            self.layer.mean = _tap_norms(weight)[None]


def _tap_norms(weight: Tensor) -> np.ndarray:
    """(out, in, K) → (K,): the Euclidean norm of each tap's weights, divided by √out."""
    return (weight.square().sum((0, 1)) / weight.shape[0]).sqrt().numpy()


class _Dynamic(_Probe):
    """Filters predicted at every position."""

    def see(self, query: Tensor) -> None:
        filters = predicted_filters(self.module.filters(query), self.module)[:, 0]
        self.add(filters.sum(0), len(filters))
        if self.show:
            self.keep(time_map(filters, self.module.padding_l))


def predicted_filters(raw: Tensor, conv: Any) -> Tensor:
    """The filters that a DynamicConv applies: raw (T,B,H,K) as predicted → (T,B,H,K) normalised, without dropout."""
    inside = None
    if conv.renorm_padding:
        length, taps = raw.shape[0], torch.arange(raw.shape[-1])
        read = torch.arange(length) - conv.padding_l + taps.unsqueeze(1)
        inside = ((read >= 0) & (read < length))[:, :, None, None]
    return Filter(raw, None, conv.normalize, 0.0, inside).taps.movedim(0, -1)


def time_map(filters: Tensor, padding_l: int) -> Tensor:
    """Filters of all positions (T,H,K) → (H,T,T): row t, column s = t − padding_l + k; taps outside are dropped."""
    length, heads, taps = filters.shape
    out = filters.new_zeros(heads, length, length)
    for t in range(length):
        first = t - padding_l
        begin, end = max(first, 0), min(first + taps, length)
        if begin < end:
            out[:, t, begin:end] = filters[t, :, begin - first : end - first]
    return out


class _Talk(_Probe):
    """Windows whose two ends are predicted."""

    def __init__(self, layer: Layer, module: Any):
        super().__init__(layer, module)
        self._reach: list[tuple[Tensor, Tensor]] = []

    def see(self, query: Tensor) -> None:
        left, right = self.module.relative_offsets(query)
        left = left[:, 0].float() * self.module.max_left
        right = torch.zeros_like(left) if right is None else right[:, 0].float() * self.module.max_right
        self._reach.append((left, right))
        positions = torch.from_numpy(self.layer.positions)
        self.add(coverage(left, right, positions).sum(0), len(left))
        if self.show:
            steps = torch.arange(len(left))
            rows = [coverage(left[t : t + 1], right[t : t + 1], steps - t)[0] for t in range(len(left))]
            self.keep(torch.stack(rows, 1))

    def finish(self) -> None:
        super().finish()
        if self._reach:
            left, right = (torch.cat(side).t().numpy() for side in zip(*self._reach, strict=True))
            self.layer.reach = left, right


def coverage(left: Tensor, right: Tensor, positions: Tensor) -> Tensor:
    """How much of the token at each relative position is in a TaLK window (Lioutas & Guo 2020, section 3.2).

    left, right: (T,H), the reach in tokens. positions: (P,) s − t. Returns (T,H,P) between 0 and 1; fractions occur at
    the window's edges.
    """
    reach = torch.where(positions < 0, left.unsqueeze(-1), right.unsqueeze(-1))
    covered = (reach - positions.abs() + 1).clamp(0, 1)
    return torch.where(positions == 0, 1.0, covered)


class _Attention(_Probe):
    """Self-attention: its weights are recomputed from the module's own projections."""

    def see(self, query: Tensor) -> None:
        weights = attention_weights(self.module, query, causal=self.layer.side == "decoder")
        total = torch.stack([weights.diagonal(int(d), 1, 2).sum(-1) for d in self.layer.positions], 1)
        self.add(total, weights.shape[1])
        if self.show:
            self.keep(weights)

    def finish(self) -> None:
        super().finish()
        if self.layer.mean is not None:
            self.layer.outside = np.clip(1 - self.layer.mean.sum(1), 0, 1)


def attention_weights(attention: Any, query: Tensor, causal: bool) -> Tensor:
    """query (T,1,d) → (H,T,T): the softmax of fairseq's MultiheadAttention, restricted as in WindowAttention."""
    q, k = (
        _projected(attention, name, query)[:, 0].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
        for name in ("q", "k")
    )
    scores = (q @ k.transpose(1, 2)).float() * attention.head_dim**-0.5
    steps = torch.arange(query.shape[0])
    distance = steps - steps.unsqueeze(1)
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if getattr(attention, "left", None) is not None:
        hidden |= (distance < -attention.left) | (distance > attention.right)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _projected(attention: nn.Module, name: str, query: Tensor) -> Tensor:
    """(T,1,d) → (T,1,d): the projection `name`, with its convolution if it has one."""
    x, conv = getattr(attention, f"{name}_proj")(query), getattr(attention, f"{name}_conv", None)
    return x if conv is None else conv(x)


def find_probes(model: nn.Module) -> list[_Probe]:
    """A probe for every layer of a model's encoder and decoder (only the decoder in a language model)."""
    probes = []
    for side in ("encoder", "decoder"):
        layers = getattr(getattr(model, side, None), "layers", ())
        for number, layer in enumerate(layers):
            mixer = getattr(layer, "self_attn", None)
            if mixer is not None:
                probes.append(_probe(side, number, mixer))
    return probes


def _probe(side: str, number: int, mixer: Any) -> _Probe:
    def layer(kind: str, rows: Sequence[str], before: int, after: int, **more) -> Layer:
        return Layer(side, number, kind, list(rows), np.arange(-before, after + 1), **more)

    conv = getattr(mixer, "conv", mixer)
    heads = [f"head {h + 1}" for h in range(conv.num_heads)]
    if hasattr(conv, "relative_offsets"):
        limits = (conv.max_left, conv.max_right)
        return _Talk(layer("talk", heads, *limits, limits=limits), conv)
    if hasattr(conv, "padding_l"):
        taps = (conv.padding_l, conv.kernel_size - 1 - conv.padding_l)
        if hasattr(conv, "weight_linear"):
            return _Dynamic(layer("dynamic", heads, *taps), conv)
        if conv.weight.shape[1] > 1 or conv.channels == 1:
            return _Fixed(layer("conv", ["values", "gates"] if conv.glu else ["all channels"], *taps), conv)
        if conv.num_heads == conv.channels:
            kind = "gated_short" if getattr(mixer, "parts", 1) == 3 else "depthwise"
            return _Fixed(layer(kind, ["all channels"], *taps), conv)
        return _Fixed(layer("lightweight", heads, *taps), conv)
    if hasattr(conv, "q_proj"):
        if getattr(conv, "left", None) is not None:
            return _Attention(layer("window_attention", heads, conv.left, conv.right), conv)
        before, after = ATTENTION_REACH
        reach = (before + after, 0) if side == "decoder" else (before, after)
        return _Attention(layer("attention", heads, *reach), conv)
    raise ValueError(f"layer {number} of the {side} has a {type(conv).__name__}, whose kernels cannot be shown")


def gather(model: nn.Module, sentences: Sequence[Mapping], shown: Sequence[int] = ()) -> list[Layer]:
    """The kernels of all layers.

    model: in evaluation mode. sentences: arguments of its forward, each a batch of one without padding; without
    sentences, only kernels that are parameters have a `mean`. shown: indices of the sentences whose maps are kept.
    """
    probes = find_probes(model)
    if all(probe.layer.kind in FIXED for probe in probes):
        sentences = ()
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for probe in (probe for probe in probes if probe.layer.kind not in FIXED):
            stack.callback(probe.module.register_forward_hook(probe, with_kwargs=True).remove)
        for number, inputs in enumerate(sentences):
            for probe in probes:
                probe.show = number in shown
            model(**inputs)
    for probe in probes:
        probe.finish()
    return [probe.layer for probe in probes]
