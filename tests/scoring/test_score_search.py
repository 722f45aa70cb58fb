"""fairseq's beam search with the bounds of summarisation: each mixer's state follows its hypotheses."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.sequence_generator import SequenceGenerator

from lightconv_plugin.mixers import MIXERS
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
