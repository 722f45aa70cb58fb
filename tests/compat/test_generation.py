"""Blocking of repeated n-grams, groups of beams, and the last batch of a data set."""

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import options, utils
from fairseq.data import data_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator

import lightconv_plugin.models  # noqa: F401 (the patches)
from tests import programs
from tests.compat.fairseq_runs import is_applied, unpatched
from tests.generation import toys
from tests.models.toys import dictionary
from tests.warm_python import warm_python


def test_last_batch():
    """Five sentences in batches whose size is a multiple of two: the fifth is a batch of its own."""
    arguments = np.arange(5), None, np.ones(5, dtype=np.int64), None, 4, 2
    assert [batch.tolist() for batch in data_utils.batch_by_size(*arguments)] == [[0, 1, 2, 3], [4]]
    if is_applied("last_batch"):
        assert [list(batch) for batch in unpatched(data_utils.batch_by_size)(*arguments)] == [[0, 1, 2, 3]]


def test_no_sentence():
    """As after all were too long: no batches, instead of an IndexError; fairseq-train then says that none are left."""
    nothing = np.arange(0)
    assert list(data_utils.batch_by_size(nothing, None, nothing, None, 4, 2)) == []


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


def grouped(search, lprobs, scores, numbers):
    """What a search chooses at each step for the sentences of these numbers; the second one is finished after two."""
    chosen = {}
    rows = torch.arange(len(numbers))
    for step in range(4):
        rows = rows[rows != 1] if step == 2 else rows
        words = torch.full((6 * len(rows), step + 1), 4)
        inputs = lprobs[step, rows].clone(), scores[rows, :, :step], words
        for row, *found in zip(rows.tolist(), *search.step(step, *inputs, numbers[rows]), strict=True):
            chosen[step, row] = [part.tolist() for part in found]
    return chosen


@pytest.mark.parametrize("scripted", [False, True], ids=["", "scripted"])
@pytest.mark.parametrize("numbers", [[0, 1, 2], [2, 0, 1], [50, 7, 9]])
def test_groups_of_beams_are_those_of_each_sentence_alone(numbers, scripted):
    words = dictionary(12)
    search = DiverseBeamSearch(words, 3, 0.5)
    search = torch.jit.script(search) if scripted else search
    lprobs, scores = torch.randn(4, 3, 6, len(words)).log_softmax(-1), torch.randn(3, 6, 4)
    together = grouped(search, lprobs, scores, torch.tensor(numbers))
    for sentence in range(3):
        alone = grouped(search, lprobs[:, [sentence] * 3], scores[[sentence] * 3], torch.arange(3))
        for (step, row), choice in together.items():
            assert row != sentence or choice == alone[step, 0]


@pytest.mark.parametrize("prefix", [None, torch.full((8, 1), 5)], ids=["", "prefix"])
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_do_not_continue_what_has_ended(groups, prefix):
    torch.manual_seed(groups)
    model, words = toys.fairseqs(), dictionary(toys.VOCABULARY)
    search = DiverseBeamSearch(words, groups, 0.5)
    generator = SequenceGenerator([model], words, beam_size=4, max_len_b=20, search_strategy=search)
    found = generator.generate([model], toys.batch(8), prefix_tokens=prefix)
    found = [one["tokens"] for ranked in found for one in ranked]
    assert len(found) == 8 * 4
    for tokens in found:
        assert tokens.eq(words.eos()).nonzero().flatten().tolist() == [len(tokens) - 1]
        assert not tokens.eq(words.pad()).any()


def test_fairseq_alone_confuses_the_groups():
    if not is_applied("diverse_groups"):
        pytest.skip("the groups of this version of fairseq know nothing of numbers")
    words = dictionary(12)
    search = DiverseBeamSearch(words, 3, 0.5)
    search.step = search.step_of_rows
    with pytest.raises(IndexError):
        grouped(search, torch.randn(4, 3, 6, len(words)), torch.randn(3, 6, 4), torch.tensor([50, 7, 9]))


@pytest.mark.parametrize("scripted", [False, True], ids=["", "scripted"])
def test_ended_samples_need_no_words_that_are_not_blocked(scripted):
    """fairseq continues them as long as others of their sentence; the end is all that the last step leaves."""
    torch.manual_seed(1)
    model, words = toys.fairseqs(), dictionary(toys.VOCABULARY)
    options = {"beam_size": 4, "max_len_b": 9, "no_repeat_ngram_size": 1}
    generator = SequenceGenerator([model], words, search_strategy=Sampling(words), **options)
    search = torch.jit.script(generator) if scripted else generator
    found = [one["tokens"].tolist() for ranked in search({"net_input": toys.batch(8)["net_input"]}) for one in ranked]
    assert len(found) == 8 * 4
    assert all(len(set(tokens)) == len(tokens) for tokens in found)


def test_replaced_unknowns_are_the_aligned_words_of_the_source():
    """By the dictionary if it has them. The alignment is that of --print-alignment: pairs of source and target."""
    given = "a <unk> b <unk>", "x Hund y", [(2, 0), (1, 1), (0, 2), (2, 3)], {"Hund": "DOG"}, "<unk>"
    assert utils.replace_unk(*given) == "a DOG b y"
    for nothing in (torch.empty(0), None, [["0.5", "0.5"]]):
        assert utils.replace_unk("a b", "x", nothing, {}, "<unk>") == "a b"
        with pytest.raises(ValueError, match="--replace-unk needs --print-alignment hard"):
            utils.replace_unk("a <unk>", "x", nothing, {}, "<unk>")
    assert utils.replace_unk("<unk>", "", [], {}, "<unk>") == "<unk>"
    for joined in ("ab <unk>", "x"), ("a b <unk>", "x"):  # pieces of the target, or of the source
        with pytest.raises(ValueError, match="--replace-unk counts the dictionary's words"):
            utils.replace_unk(*joined, [(0, 0), (1, 1), (2, 2)], {}, "<unk>")


def test_unknowns_are_replaced_without_a_dictionary(tmp_path):
    """By the words of the source, as fairseq does if it is given nothing; `--replace-unk` alone gives it "@@ "."""
    arguments = ["data", "--path", "model.pt", "--replace-unk"]
    given = options.parse_args_and_arch(options.get_generation_parser(), arguments).replace_unk
    assert utils.load_align_dict(given) == {} and utils.load_align_dict(None) is None
    (tmp_path / "words.txt").write_text("Hund DOG\n")
    assert utils.load_align_dict(str(tmp_path / "words.txt")) == {"Hund": "DOG"}
    if is_applied("unknowns_without_dictionary"):
        with pytest.raises(FileNotFoundError, match="@@ "):
            unpatched(utils.load_align_dict)(given)


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
    environment = {"LIGHTCONV_SKIP_PATCHES": "repeated_ngrams", "CUDA_VISIBLE_DEVICES": ""}
    done = programs.run(warm_python(), "-c", BLOCK, status=None, **environment)
    needed = is_applied("repeated_ngrams")
    assert ("nothing is blocked" in done.stderr) == needed, done.stderr[-2000:]
    assert (done.returncode == 0) == (not needed)
