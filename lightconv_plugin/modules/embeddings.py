"""Embeddings of words and positions."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.config import AdaptiveInputConfig, bands
from lightconv_plugin.modules.linear import Linear


def word_embedding(vocab_size: int, dim: int, pad: int | None) -> nn.Embedding:
    """A table of `vocab_size` words, initialised as in fairseq's Transformer; the pad's row is zero."""
    table = nn.Embedding(vocab_size, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    if pad is not None:
        nn.init.zeros_(table.weight[pad])
    return table


def positions_of(pads: Tensor, seen: Tensor | None = None) -> Tensor:
    """(B,T) position numbers: words are counted from 1, continuing after `seen` (B,) earlier words; pads are 0."""
    words = (~pads).long()
    numbers = words.cumsum(dim=1)
    if seen is not None:
        numbers = numbers + seen.unsqueeze(1)
    return numbers * words


class SinusoidalPositions(nn.Module):
    """Sines in the first half of the channels, cosines in the second (Vaswani et al. 2017, as in tensor2tensor).

    Computed on demand in float32: there is no table to store, and no limit on the length.

    Args:
        dim: channels.
        pad: by how much fairseq's position numbers are higher.
    """

    def __init__(self, dim: int, pad: int):
        super().__init__()
        self.dim = dim
        self.pad = pad

    def forward(self, positions: Tensor, dtype: torch.dtype, longest: int | None = None) -> Tensor:
        """positions (B,T) from `positions_of` → (B,T,dim); zeros at pads.

        `longest`: an upper bound of the positions. If given, each vector is computed once, not once per sentence.
        """
        if longest is not None:
            return F.embedding(positions, self.table(longest, positions.device, dtype))
        waves = self._waves(positions + self.pad)
        return waves.masked_fill(positions.eq(0).unsqueeze(-1), 0).to(dtype)

    def table(self, longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(longest + 1, dim): the vectors of the positions 0 (a pad's) … longest."""
        waves = self._waves(torch.arange(self.pad, self.pad + longest + 1, device=device))
        return torch.cat([torch.zeros_like(waves[:1]), waves[1:]]).to(dtype)

    def _waves(self, numbers: Tensor) -> Tensor:
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=numbers.device).float() * -(math.log(10000) / max(half - 1, 1)))
        angles = numbers.float().unsqueeze(-1) * rates
        waves = [torch.sin(angles), torch.cos(angles)]
        if self.dim % 2:
            waves.append(torch.zeros_like(angles[..., :1]))
        return torch.cat(waves, dim=-1)

    def extra_repr(self) -> str:
        return str(self.dim)


class LearnedPositions(nn.Module):
    """A table of learned vectors.

    Parameters: weight (pad + 1 + length, dim), as in fairseq: the first `pad` rows are unused, the next one is for
        pads.
    """

    def __init__(self, length: int, dim: int, pad: int):
        super().__init__()
        self.pad = pad
        self.length = length
        self.weight = nn.Parameter(torch.empty(pad + 1 + length, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        nn.init.zeros_(self.weight[pad])

    def forward(self, positions: Tensor, dtype: torch.dtype, longest: int | None = None) -> Tensor:
        """positions (B,T) from `positions_of` → (B,T,dim)."""
        return F.embedding(positions + self.pad, self.weight, padding_idx=self.pad).to(dtype)

    def check(self, last: int) -> None:
        """ValueError if there is no position `last`."""
        if last > self.length:
            raise ValueError(f"a sequence of {last} tokens is longer than the {self.length} learned positions")

    def table(self, longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(longest + 1, dim): the vectors of the positions 0 (a pad's) … longest."""
        return self.weight[self.pad : self.pad + longest + 1].to(device, dtype)

    def extra_repr(self) -> str:
        return f"{self.length}, {self.weight.shape[1]}"


class AdaptiveInput(nn.Module):
    """Word embeddings in bands, smaller ones for rarer words, each with a projection (Baevski & Auli 2019).

    Parameters: embeddings.N.0.weight (words of the band, dim / factor^N), embeddings.N.1.weight (output_dim, the same).
    """

    def __init__(self, vocab_size: int, dim: int, output_dim: int, pad: int, config: AdaptiveInputConfig):
        super().__init__()
        ends = bands(config.cutoff, vocab_size)
        self.ends = ends
        self.embeddings = nn.ModuleList()
        for begin, end, width in zip([0, *ends], ends, config.widths(vocab_size, dim), strict=False):
            table = word_embedding(end - begin, width, pad - begin if begin <= pad < end else None)
            self.embeddings.append(nn.Sequential(table, Linear(width, output_dim, bias=False)))

    def weights(self, band: int) -> tuple[Tensor, Tensor]:
        """The word vectors of a band (words, width), and their projection (output_dim, width)."""
        vectors: Any = self.embeddings[band]
        return vectors[0].weight, vectors[1].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(B,T) → (B,T,output_dim)."""
        out = None
        begin = 0
        for end, band in zip(self.ends, self.embeddings, strict=True):
            inside = (tokens >= begin) & (tokens < end)
            # Every band embeds every position but keeps only its own words, so that no shape depends on the words.
            vectors = band((tokens - begin).clamp(0, end - begin - 1)).masked_fill(~inside.unsqueeze(-1), 0)
            out = vectors if out is None else out + vectors
            begin = end
        assert out is not None
        return out
