"""Blocking of repeated n-grams, and the last batch of a data set."""

import os
import subprocess

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.data import data_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator

import lightconv_plugin.models  # noqa: F401 (the patches)
from tests.compat.fairseq_runs import is_applied, unpatched
from tests.fairseq_cli import REPOSITORY
from tests.models.toys import dictionary
from tests.warm_python import warm_python


def test_last_batch():
    """Five sentences in batches whose size is a multiple of two: the fifth is a batch of its own."""
    arguments = np.arange(5), None, np.ones(5, dtype=np.int64), None, 4, 2
    assert [batch.tolist() for batch in data_utils.batch_by_size(*arguments)] == [[0, 1, 2, 3], [4]]
    if is_applied("last_batch"):
        assert [list(batch) for batch in unpatched(data_utils.batch_by_size)(*arguments)] == [[0, 1, 2, 3]]


def hypotheses(step):
    """Tokens of eight hypotheses after `step` words of a vocabulary of three."""
    tokens = torch.randint(3, 6, (8, 40))
    tokens[:, 0] = 2  # every hypothesis begins with the end of the sentence
    tokens[:, step + 1 :] = 1
    return tokens


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 9, 30])
def test_what_would_repeat_is_blocked_and_nothing_else(n, step):
    torch.manual_seed(n)
    tokens = hypotheses(step)
    before = torch.randn(8, 9)
    got = NGramRepeatBlock(n, use_extension=False)(tokens, before.clone(), 2, 4, step)
    for row in range(8):
        words = tokens[row, 1 : step + 1].tolist()
        for word in range(9):
            new = tuple([*words, word][-n:])
            seen = {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
            expected = -torch.inf if len(new) == n and new in seen else before[row, word]
            assert got[row, word] == expected


@pytest.mark.parametrize("n", [1, 3])
def test_repeated_ngrams_can_be_scripted(n):
    block = NGramRepeatBlock(n, use_extension=False)
    scripted = torch.jit.script(block)
    for step in 0, 2, 3, 9, 30:
        tokens, before = hypotheses(step), torch.randn(8, 9)
        expected = block(tokens, before.clone(), 2, 4, step)
        assert torch.equal(scripted(tokens, before.clone(), 2, 4, step), expected)


def test_a_generator_that_blocks_can_be_scripted():
    """SequenceGenerator with a fairseq Transformer, as fairseq's own tests script it."""
    from argparse import Namespace

    from fairseq.models.transformer import TransformerModel
    from fairseq.tasks.fairseq_task import LegacyFairseqTask

    words = dictionary(10)

    class Task(LegacyFairseqTask):
        source_dictionary = target_dictionary = words

    settings = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
        ("embed_dim", 8), ("ffn_embed_dim", 8), ("layers", 1), ("attention_heads", 2))}  # fmt: skip
    model = TransformerModel.build_model(Namespace(arch="transformer", **settings), Task(None)).eval()
    generator = SequenceGenerator([model], words, beam_size=2, max_len_b=10, no_repeat_ngram_size=2)
    scripted = torch.jit.script(generator)
    source = torch.tensor([[5, 6, 7, 2]])
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([4])}}
    expected, found = generator.forward(sample), scripted(sample)
    assert [hypothesis["tokens"].tolist() for hypothesis in found[0]] == [
        hypothesis["tokens"].tolist() for hypothesis in expected[0]
    ]


BLOCK = """
import torch
from lightconv_plugin import compat
compat.apply()
from fairseq.ngram_repeat_block import NGramRepeatBlock
tokens = torch.tensor([[2, 4, 5, 6, 4, 5, 1, 1, 1]])
assert NGramRepeatBlock(3)(tokens, torch.zeros(1, 8), 1, 1, 5)[0, 6] == -torch.inf, "nothing is blocked"
"""


def test_fairseq_alone_blocks_nothing():
    """Without repeated_ngrams --no-repeat-ngram-size does nothing on the CPU: so it is needed."""
    environment = {**os.environ, "LIGHTCONV_SKIP_PATCHES": "repeated_ngrams", "PYTHONPATH": str(REPOSITORY)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([warm_python(), "-c", BLOCK], env=environment, capture_output=True, text=True, timeout=300)
    needed = is_applied("repeated_ngrams")
    assert ("nothing is blocked" in done.stderr) == needed, done.stderr[-2000:]
    assert (done.returncode == 0) == (not needed)
