"""Patches for fairseq-preprocess on large texts: its slowest steps, and processes that it leaves idle."""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.processes import called


@patch(versions="all versions of fairseq")
def line_encoding() -> None:
    """fairseq writes the numbers of a line into a tensor one by one, which takes most of the time of binarising."""
    from fairseq.data import Dictionary
    from fairseq.tokenizer import tokenize_line

    def encode_line(
        self: Dictionary,
        line: str,
        line_tokenizer: Callable[[str], list[str]] = tokenize_line,
        add_if_not_exist: bool = True,
        consumer: Callable[[str, int], None] | None = None,
        append_eos: bool = True,
        reverse_order: bool = False,
    ) -> torch.Tensor:
        words = line_tokenizer(line)
        if reverse_order:
            words = words[::-1]
        find = self.add_symbol if add_if_not_exist else self.index
        numbers = [find(word) for word in words]
        if consumer is not None:
            for word, number in zip(words, numbers, strict=True):
                consumer(word, number)
        if append_eos:
            numbers.append(self.eos_index)
        return torch.tensor(numbers, dtype=torch.int32)

    Dictionary.encode_line = encode_line


# At module level, because it is pickled by name for other processes.
def _count_words(
    filename: str, tokenize: Callable[[str], list[str]], eos_word: str, start_offset: int, end_offset: int
) -> Counter[str]:
    from fairseq.file_chunker_utils import Chunker

    counter: Counter[str] = Counter()
    lines = 0
    with Chunker(filename, start_offset, end_offset) as chunk:
        for line in chunk:
            counter.update(tokenize(line))
            lines += 1
    if lines:
        counter[eos_word] += lines
    return counter


@patch(versions="all versions of fairseq")
def word_counts() -> None:
    """fairseq counts a text word by word for its dictionary, and waits for ever if a process that counts is killed.

    The resulting dictionary is the same: the parts are added in order.
    """
    from fairseq.data import Dictionary
    from fairseq.file_chunker_utils import find_offsets
    from fairseq.file_io import PathManager

    def add_file_to_dictionary(
        filename: str, dict: Dictionary, tokenize: Callable[[str], list[str]], num_workers: int
    ) -> None:
        file = PathManager.get_local_path(filename)
        parts = pairwise(find_offsets(file, num_workers))
        first, *others = [(file, tokenize, dict.eos_word, *part) for part in parts]
        with called(_count_words, others, ": try fewer --workers") as results:
            counts: list[Callable[[], Counter[str]]] = [partial(_count_words, *first), *results]
            for counted in counts:
                for word, count in sorted(counted().items()):
                    dict.add_symbol(word, count)

    Dictionary.add_file_to_dictionary = staticmethod(add_file_to_dictionary)


@patch(versions="all versions of fairseq")
def idle_workers() -> None:
    """fairseq binarises the first of N parts only after the others are done: two workers take as long as one.

    The resulting files are the same: the parts are joined in order.
    """
    from fairseq.binarizer import BinarizeSummary, FileBinarizer
    from fairseq.data import indexed_dataset
    from fairseq.file_chunker_utils import find_offsets

    original = FileBinarizer.multiprocess_dataset.__func__

    def multiprocess_dataset(
        cls: type[FileBinarizer],
        input_file: str,
        dataset_impl: str,
        binarizer: Any,
        output_prefix: str,
        vocab_size: int | None = None,
        num_workers: int = 1,
    ) -> BinarizeSummary:
        if num_workers <= 1:
            return original(cls, input_file, dataset_impl, binarizer, output_prefix, vocab_size, num_workers)
        offsets = find_offsets(input_file, num_workers)
        first, *others = pairwise(offsets)
        parts = [f"{output_prefix}.pt{number}" for number in range(1, len(others) + 1)]
        calls = [
            (binarizer, input_file, *chunk, part, dataset_impl, vocab_size)
            for chunk, part in zip(others, parts, strict=True)
        ]
        with called(cls._binarize_chunk_and_finalize, calls, ": try fewer --workers") as results:
            dataset, summary = cls._binarize_file_chunk(
                binarizer, input_file, *first, output_prefix, dataset_impl, vocab_size
            )
            for result, part in zip(results, parts, strict=True):
                summary.merge(result())
                dataset.merge_file_(part)
                os.remove(indexed_dataset.data_file_path(part))
                os.remove(indexed_dataset.index_file_path(part))
        dataset.finalize(indexed_dataset.index_file_path(output_prefix))
        return summary

    FileBinarizer.multiprocess_dataset = classmethod(multiprocess_dataset)
