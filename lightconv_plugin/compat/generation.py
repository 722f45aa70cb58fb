"""Patches for decoding, and for the batches that fairseq makes for it."""

import math
from typing import Any

import numpy as np
import torch

from lightconv_plugin.compat.registry import patch

_ALONE = "@@ "  # the value of --replace-unk without a file


def _last_batch_is_dropped() -> bool:
    from fairseq.data import data_utils

    three = data_utils.batch_by_size(np.arange(3), None, np.ones(3, dtype=np.int64), None, 2, 2)
    return sum(map(len, three)) < 3


@patch(versions="fairseq's main branch since December 2022, fairseq-fixed", needed=_last_batch_is_dropped)
def last_batch() -> None:
    """fairseq drops the last batch unless its size is a multiple of --required-batch-size-multiple, 8 by default.

    `fairseq-generate` then translates fewer sentences than the test set has, and computes BLEU over these, without a
    warning. Validation and training lose the same batch, which has the longest sentences. Where no sentence is short
    enough, it fails with an IndexError instead of its message that the data set is empty.
    """
    from fairseq.data import data_utils

    original = data_utils.batch_by_size

    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)
        batches = list(original(indices, *args, **kwargs)) if len(indices) else []  # it looks at the last of them
        kept = sum(map(len, batches))  # batches are consecutive slices of `indices`
        return [*batches, indices[kept:]] if kept < len(indices) else batches

    data_utils.batch_by_size = batch_by_size


def _repeats_are_not_blocked() -> bool:
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    words = torch.tensor([[2, 4, 5, 6, 4, 5, 1, 1]])  # after "4 5 6 4 5", in a buffer for two more words
    return NGramRepeatBlock(3, use_extension=False)(words, torch.zeros(1, 8), 1, 1, 5)[0, 6] != -math.inf


@patch(versions="all versions of fairseq, without its CUDA extension", needed=_repeats_are_not_blocked)
def repeated_ngrams() -> None:
    """fairseq compares padding instead of words for --no-repeat-ngram-size, so nothing is blocked.

    This happens on the CPU, and on a GPU if fairseq was installed from a wheel (fairseq issues 4709 and 5206).
    """
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    # torch.jit.script compiles this method with SequenceGenerator, so it uses only what TorchScript supports.
    def _no_repeat_ngram(
        self, tokens: torch.Tensor, lprobs: torch.Tensor, bsz: int, beam_size: int, step: int
    ) -> torch.Tensor:
        # tokens (hypotheses, length): words 1 … step are chosen; lprobs (hypotheses, vocabulary) are for the next one.
        n = self.no_repeat_ngram_size
        if step >= n:
            ngrams = tokens[:, 1 : step + 1].unfold(1, n, 1)
            repeats = (ngrams[:, :, :-1] == tokens[:, step + 2 - n : step + 1].unsqueeze(1)).all(dim=2)
            rows, begins = repeats.nonzero().unbind(dim=1)
            lprobs[rows, ngrams[rows, begins, -1]] = -math.inf
        return lprobs

    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram


def _groups_are_confused() -> bool:
    from fairseq.data import Dictionary
    from fairseq.search import DiverseBeamSearch

    words = Dictionary()
    search = DiverseBeamSearch(words, 2, 0.5)
    number = torch.tensor([1])  # one sentence, the data set's second
    try:
        search.step(0, torch.zeros(1, 2, len(words)), torch.zeros(1, 2, 0), None, number)
        search.step(1, torch.zeros(1, 2, len(words)), torch.zeros(1, 2, 1), None, number)
    except IndexError:
        return True
    return False


@patch(versions="fairseq's main branch, fairseq-fixed", needed=_groups_are_confused)
def diverse_groups() -> None:
    """fairseq's --diverse-beam-groups fails, mixes the penalties of sentences, or continues hypotheses after their end.

    It keeps the overlap of the groups by row of the batch, and reads it by the sentence's number in the data set: this
    is another sentence's, or an IndexError. Here the numbers of the first step tell the row.

    It chooses no more candidates than there are hypotheses, so that one that has ended stays among them, and competes
    with the others. Here only padding follows it, at the last place of its group, where the generator ignores it.
    """
    from fairseq.search import DiverseBeamSearch

    original_init, original_step = DiverseBeamSearch.__init__, DiverseBeamSearch.step

    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.numbers = torch.empty(0, dtype=torch.long)

    # torch.jit.script compiles this method with SequenceGenerator, so it uses only what TorchScript supports.
    @torch.jit.export
    def step(
        self,
        step: int,
        lprobs: torch.Tensor,
        scores: torch.Tensor,
        prev_output_tokens: torch.Tensor | None = None,
        original_batch_idxs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.arange(lprobs.size(0), device=lprobs.device)
        if original_batch_idxs is not None:
            if step == 0:
                self.numbers = original_batch_idxs
            rows = original_batch_idxs.unsqueeze(1).eq(self.numbers).to(torch.uint8).argmax(1)
        if step > 0 and prev_output_tokens is not None:
            words, totals = prev_output_tokens[:, -1].view(lprobs.size(0), -1), scores[:, :, step - 1]
            ended = (words.eq(self.eos) | words.eq(self.pad)) & totals.ne(-math.inf)
            lprobs = lprobs.masked_fill(ended.unsqueeze(2), -math.inf)
            # Their new totals are below any other, and within float16.
            lprobs[:, :, self.pad] = torch.where(ended, -30000 - totals, lprobs[:, :, self.pad])
        return self.step_of_rows(step, lprobs, scores, prev_output_tokens, rows)

    DiverseBeamSearch.__init__ = __init__
    DiverseBeamSearch.step_of_rows = original_step
    DiverseBeamSearch.step = step


def _ended_samples_need_words() -> bool:
    from fairseq.data import Dictionary
    from fairseq.search import Sampling

    words = Dictionary()
    nothing = torch.full((1, 1, len(words)), -math.inf)
    try:
        Sampling(words).step(2, nothing, torch.zeros(1, 1, 2), torch.tensor([[2, 3, 2]]), torch.tensor([0]))
    except RuntimeError:
        return True
    return False


@patch(versions="all versions of fairseq", needed=_ended_samples_need_words)
def ended_samples() -> None:
    """fairseq's --sampling with --no-repeat-ngram-size fails where all words are blocked for a sample that has ended.

    A sample is continued, to no effect, until the others of its sentence have ended as well. Only the end is possible
    in the last step, and blocked if it would be a repetition. Here the sample then ends once more.
    """
    from fairseq.search import Sampling

    original_step = Sampling.step

    # torch.jit.script compiles this method with SequenceGenerator, so it uses only what TorchScript supports.
    @torch.jit.export
    def step(
        self,
        step: int,
        lprobs: torch.Tensor,
        scores: torch.Tensor,
        prev_output_tokens: torch.Tensor | None = None,
        original_batch_idxs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if step > 0 and prev_output_tokens is not None:
            ended = prev_output_tokens[:, 1:].eq(self.eos).any(dim=1).view(lprobs.size(0), -1)
            blocked = lprobs.amax(dim=2).eq(-math.inf)
            lprobs[:, :, self.eos] = lprobs[:, :, self.eos].masked_fill(ended & blocked, 0.0)
        return self.step_of_words(step, lprobs, scores, prev_output_tokens, original_batch_idxs)

    Sampling.step_of_words = original_step
    Sampling.step = step


def _unknowns_are_not_replaced() -> bool:
    from fairseq import utils

    try:
        return utils.replace_unk("<unk>", "a", [(0, 0)], {}, "<unk>") != "a"
    except TypeError:
        return True


@patch(versions="all versions of fairseq", needed=_unknowns_are_not_replaced)
def replaced_unknowns() -> None:
    """fairseq's --replace-unk fails at the first unknown word of a translation, with an alignment or without.

    It expects the position of a source word for each word, and --print-alignment gives pairs of positions. Here these
    are read, and an error says that they are missing, or are of other words because pieces have been joined.
    """
    from fairseq import utils

    original = utils.replace_unk

    def replace_unk(hypo_str: str, src_str: str, alignment: Any, align_dict: dict[str, str], unk: str) -> str:
        if unk not in hypo_str.split():
            return original(hypo_str, src_str, alignment, align_dict, unk)
        if not isinstance(alignment, list) or not all(isinstance(pair, tuple) for pair in alignment):
            raise ValueError("--replace-unk needs --print-alignment hard")
        if not alignment:  # of a source without words
            return hypo_str
        sources = [source for source, _ in sorted(alignment, key=lambda pair: pair[1])]
        if len(sources) != len(hypo_str.split()) or max(sources) > len(src_str.split()):
            raise ValueError("--replace-unk counts the dictionary's words: leave out --post-process (--remove-bpe)")
        return original(hypo_str, src_str, sources, align_dict, unk)

    utils.replace_unk = replace_unk


def _dictionary_is_the_mark_of_a_piece() -> bool:
    from fairseq.dataclass.configs import GenerationConfig

    return GenerationConfig.__dataclass_fields__["replace_unk"].metadata.get("argparse_const") == _ALONE


@patch(versions="all versions of fairseq", needed=_dictionary_is_the_mark_of_a_piece)
def unknowns_without_dictionary() -> None:
    """fairseq's --replace-unk alone fails: its parser then gives the mark of a piece, "@@ ", as the dictionary's file.

    Without a dictionary, words of the source are to be copied (fairseq issue 3533).
    """
    from fairseq import utils

    original = utils.load_align_dict

    def load_align_dict(replace_unk: str | None) -> dict[str, str] | None:
        return original("" if replace_unk == _ALONE else replace_unk)

    utils.load_align_dict = load_align_dict
