"""fairseq's beam search with the bounds of summarisation: each mixer's state follows its hypotheses."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator

from lightconv_plugin import fairseq_patches
from lightconv_plugin.modules.mixers import MIXERS
from tests.fairseq_cli import REPOSITORY
from tests.models.toys import batch, build, dictionary, task

SHORTEST, LONGEST, BEAM = 12, 20, 4


def searched(mixer, **bounds):
    """(model, sample, hypotheses of each sentence, best first) of a random model whose end is likely and repetitive."""
    torch.manual_seed(5)
    words = dictionary(10)
    # Wide filters: state older than one step matters, and a wrong order of the hypotheses shows.
    model = build("dynamicconv", task(words), encoder_conv_type=mixer, decoder_conv_type=mixer)
    with torch.no_grad():
        model.decoder.output_projection.weight[words.eos()] *= 1.5
    source, lengths, _ = batch((9, 6, 11), vocabulary=10)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    generator = SequenceGenerator([model], words, beam_size=BEAM, len_penalty=2.0, max_len_a=0, **bounds)
    with torch.no_grad():
        return model, sample["net_input"], generator.generate([model], sample)


def repeats(tokens, n=3):
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(grams) > len(set(grams))


def of_all(found):
    """The words of every hypothesis, without the end of the sentence."""
    return [hypothesis["tokens"][:-1].tolist() for sentence in found for hypothesis in sentence]


@pytest.mark.parametrize("mixer", MIXERS)
def test_bounds_and_blocking_leave_the_scores_those_of_the_full_pass(mixer):
    bounds = {"min_len": SHORTEST, "max_len_b": LONGEST, "no_repeat_ngram_size": 3}
    model, inputs, found = searched(mixer, **bounds)
    assert [len(sentence) for sentence in found] == [BEAM] * 3
    for words in of_all(found):
        assert SHORTEST <= len(words) <= LONGEST
        assert not repeats(words)
    for row, sentence in enumerate(found):
        for hypothesis in sentence:
            tokens = hypothesis["tokens"]
            previous = torch.cat([torch.tensor([2]), tokens[:-1]])[None]
            with torch.no_grad():
                logits, _ = model(inputs["src_tokens"][row : row + 1], inputs["src_lengths"][row : row + 1], previous)
            expected = logits.log_softmax(dim=-1)[0].gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-5, rtol=1e-4)


def test_without_the_bounds_this_model_breaks_each():
    """So that the test above can fail."""
    free = of_all(searched("dynamic", max_len_b=60)[2])
    assert any(repeats(words) for words in free)
    assert any(not SHORTEST <= len(words) <= LONGEST for words in free)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 9, 30])
def test_what_would_repeat_is_blocked_and_nothing_else(n, step):
    torch.manual_seed(n)
    tokens = torch.randint(3, 6, (8, 40))
    tokens[:, 0] = 2  # every hypothesis begins with the end of the sentence
    tokens[:, step + 1 :] = 1
    before = torch.randn(8, 9)
    got = NGramRepeatBlock(n, use_extension=False)(tokens, before.clone(), 2, 4, step)
    for row in range(8):
        words = tokens[row, 1 : step + 1].tolist()
        for word in range(9):
            new = tuple([*words, word][-n:])
            seen = {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
            expected = -torch.inf if len(new) == n and new in seen else before[row, word]
            assert got[row, word] == expected


BLOCK = """
import torch
import lightconv_plugin.fairseq_patches as patches
patches.apply()
from fairseq.ngram_repeat_block import NGramRepeatBlock
tokens = torch.tensor([[2, 4, 5, 6, 4, 5, 1, 1, 1]])
assert NGramRepeatBlock(3)(tokens, torch.zeros(1, 8), 1, 1, 5)[0, 6] == -torch.inf, "nothing is blocked"
"""


def test_fairseq_alone_blocks_nothing():
    """Without patch L --no-repeat-ngram-size does nothing on the CPU: so it is needed."""
    environment = {**os.environ, "LIGHTCONV_SKIP_PATCHES": "L", "PYTHONPATH": str(REPOSITORY)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", BLOCK], env=environment, capture_output=True, text=True, timeout=300)
    needed = any(name.startswith("L ") for name, _ in fairseq_patches.applied())
    assert ("nothing is blocked" in done.stderr) == needed, done.stderr[-2000:]
    assert (done.returncode == 0) == (not needed)
