"""transformers' Marian, the sizes of fairseq's Transformer and random weights; needs the package `transformers`."""

from __future__ import annotations

import torch
from torch import nn

import lightconv_plugin.hf  # noqa: F401 (before transformers: it hides a torchaudio that does not match torch)

# isort: split
from transformers import MarianConfig, MarianMTModel

from benchmarks.report import BenchmarkError
from benchmarks.searches import Batch, SearchSettings


class MarianSearch:
    """`MarianMTModel.generate` with forced lengths; see searches.TorchSearch. Its weights are random ones of its own.

    model: fairseq's Transformer whose sizes it gets. words: the dictionary.
    """

    def __init__(self, model: nn.Module, words, settings: SearchSettings, device: torch.device, dtype: torch.dtype):
        if settings.length is None:
            raise BenchmarkError("transformers' Marian is measured with random weights, whose lengths are forced")
        self.words, self.settings, self.device = words, settings, device
        self.peak_bytes: int | None = None
        sizes: dict = {}
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            layer = stack.layers[0]
            sizes[f"{side}_layers"] = len(stack.layers)
            sizes[f"{side}_ffn_dim"] = layer.fc1.out_features
            sizes[f"{side}_attention_heads"] = layer.self_attn.num_heads
        config = MarianConfig(
            vocab_size=len(words),
            d_model=model.decoder.embed_tokens.embedding_dim,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=1024,
            pad_token_id=words.pad(),
            eos_token_id=words.eos(),
            forced_eos_token_id=words.eos(),
            decoder_start_token_id=words.eos(),
            **sizes,
        )
        self.model = MarianMTModel(config).eval().to(device, dtype)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def translate(self, batch: Batch) -> list[list[int]]:
        """Translate a batch; BenchmarkError if the lengths are not the forced ones."""
        longest = max(map(len, batch))
        tokens = torch.full((len(batch), longest), self.words.pad())
        for row, sentence in zip(tokens, batch, strict=True):
            row[: len(sentence)] = torch.as_tensor(sentence)
        tokens = tokens.to(self.device)
        steps = 1 + self.settings.length  # with the first token, which is given
        out = self.model.generate(
            tokens,
            attention_mask=tokens.ne(self.words.pad()),
            num_beams=self.settings.beam,
            min_length=steps,
            max_length=steps,
            length_penalty=self.settings.lenpen,
        )
        if out.shape[1] != steps:
            raise BenchmarkError(
                f"translations of {self.settings.length} tokens were asked for, got {out.shape[1] - 1}"
            )
        return [line[1:-1] for line in out.tolist()]
