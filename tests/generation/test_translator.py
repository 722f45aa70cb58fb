"""Translator: the same translations as fairseq's own commands and generator, in order, whatever the batches."""

import functools
import math
import re
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.sequence_generator import SequenceGenerator
from sacremoses import MosesDetokenizer

from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import Translator
from lightconv_plugin.generation.finished import NoHypothesisError
from lightconv_plugin.generation.scorer import Scorer
from lightconv_plugin.generation.translation_models import make_batches
from tests import fairseq_cli
from tests.generation import translation_toys as toys
from tests.generation.recordings import searching

LINES = toys.lines(14, seed=3)
SHORT = {"max_len_b": 20}


@pytest.fixture(scope="module")
def translator(checkpoints):
    return Translator(checkpoints["dynamicconv"], **SHORT)


@functools.cache
def loaded(*paths):
    return checkpoint_utils.load_model_ensemble_and_task([str(path) for path in paths])


def by_fairseq(paths, lines, nbest=1, **options):
    """[(pieces, score to base 2)] of each line: fairseq's generator on each sentence alone."""
    models, _, task = loaded(*paths)
    generator = SequenceGenerator([m.eval() for m in models], task.target_dictionary, **{"beam_size": 5, **options})
    encode = toys.bpe(task.cfg.data)
    results = []
    for line in lines:
        pieces = encode(toys.RECIPE.tokenise()(line))
        tokens = task.source_dictionary.encode_line(pieces, add_if_not_exist=False).long()
        sample = {"net_input": {"src_tokens": tokens[None], "src_lengths": torch.tensor([len(tokens)])}}
        ranked = generator.generate(models, sample)[0][:nbest]
        results.append(
            [(task.target_dictionary.string(r["tokens"]).split(), float(r["score"]) / math.log(2)) for r in ranked]
        )
    return results


def check(translations, expected, nbest=1):
    """Equal pieces and scores; hypotheses with scores nearer than the tolerance may change places."""
    for translation, wanted in zip(translations, expected, strict=True):
        assert len(translation.hypotheses) == nbest
        scores = [score for _, score in wanted]
        assert [h.score for h in translation.hypotheses] == pytest.approx(scores, abs=2e-4)
        for hypothesis, (pieces, score) in zip(translation.hypotheses, wanted, strict=True):
            if sum(abs(score - other) < 4e-4 for other in scores) == 1:
                assert list(hypothesis.tokens) == pieces


@pytest.mark.parametrize("name", ["dynamicconv", "lightweightconv", "talkconv", "transformer"])
def test_equals_fairseqs_generator_on_each_sentence_alone(name, checkpoints):
    with Translator(checkpoints[name], **SHORT) as translator:
        check(translator.translate(LINES), by_fairseq([checkpoints[name]], LINES, max_len_b=20))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({"beam": 1}, {"beam_size": 1}),
        ({"beam": 3, "lenpen": 0.4}, {"beam_size": 3, "len_penalty": 0.4}),
        ({"lenpen": 2.0, "min_len": 6}, {"len_penalty": 2.0, "min_len": 6}),
        ({"unkpen": -3.0}, {"unk_penalty": -3.0}),
        ({"no_repeat_ngram_size": 2, "temperature": 1.3}, {"no_repeat_ngram_size": 2, "temperature": 1.3}),
    ],
    ids=lambda options: "-".join(f"{k}{v}" for k, v in options.items()),
)
def test_options_mean_what_fairseqs_mean(ours, theirs, checkpoints):
    translator = Translator(checkpoints["dynamicconv"], **{**SHORT, **ours})
    check(translator.translate(LINES[:6]), by_fairseq([checkpoints["dynamicconv"]], LINES[:6], max_len_b=20, **theirs))


def test_an_ensemble(checkpoints):
    paths = [checkpoints["dynamicconv"], checkpoints["transformer"]]
    with Translator(paths, **SHORT) as translator:
        check(translator.translate(LINES[:5], nbest=2), by_fairseq(paths, LINES[:5], nbest=2, max_len_b=20), nbest=2)


def test_an_ensemble_takes_no_more_than_its_shortest_model(checkpoints, data, tmp_path):
    few = {"max_source_positions": 16, "max_target_positions": 12}
    paths = [checkpoints["dynamicconv"], toys.make_checkpoint(tmp_path / "short.pt", data, task=few, **few)]
    with Translator(paths, min_len=12) as translator:
        long, reference = translator.score(["haus " * 20, "Hund"], ["Two men", "dog " * 20])
        assert long.problem.endswith("the model takes 15") and reference.problem.endswith("the model takes 11")
        with pytest.raises(TranslationError, match="at most the maximum length, here 11, got 12"):
            translator.translate(["Hund"])


def test_checkpoints_with_other_dictionaries_are_no_ensemble(checkpoints, data, tmp_path):
    """The sizes are the same. Dictionaries that are given count for all."""
    for path in data.glob("dict.*.txt"):
        (tmp_path / path.name).write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    paths = [checkpoints["dynamicconv"], toys.make_checkpoint(tmp_path / "other.pt", tmp_path)]
    with pytest.raises(TranslationError, match=r"other\.pt have different dictionaries .*: they cannot"):
        Translator(paths)
    Translator(paths, data).close()


def test_equals_fairseq_interactive(translator, checkpoints, data):
    """The command on tokenised text, with its own BPE: H- lines are our pieces and scores, D- lines our tokens."""
    tokenise = toys.RECIPE.tokenise()
    printed = fairseq_cli.run(
        *("interactive", data, "--path", checkpoints["dynamicconv"], "--user-dir", fairseq_cli.USER_DIR, "--cpu"),
        *("--beam", 5, "--nbest", 2, "--max-len-b", 20, "--source-lang", "de", "--target-lang", "en"),
        *("--bpe", "subword_nmt", "--bpe-codes", data.parent / "bpe" / "codes"),
        *("--buffer-size", 20, "--max-tokens", 99),
        stdin="".join(f"{tokenise(line)}\n" for line in LINES),
    )
    rows = {"H": [], "D": []}
    for line in printed.splitlines():
        if line[:2] in ("H-", "D-"):
            number, score, text = line.split("\t")
            rows[line[0]].append((int(number[2:]), float(score), text))
    found = translator.translate(LINES, nbest=2)
    check(
        found, [[(text.split(), score) for n, score, text in rows["H"] if n == i] for i in range(len(LINES))], nbest=2
    )
    best = {n: text for n, _, text in reversed(rows["D"])}
    moses = MosesDetokenizer(lang="en")
    assert [t.text for t in found] == [moses.detokenize(best[i].split()) for i in range(len(LINES))]


@pytest.mark.parametrize("batches", [{"batch_tokens": 1}, {"batch_size": 3}, {"batch_tokens": 40}], ids=str)
def test_neither_batches_nor_the_order_of_lines_change_a_translation(batches, translator, checkpoints):
    expected = translator.translate(LINES)
    with Translator(checkpoints["dynamicconv"], **SHORT, **batches) as other:
        got = other.translate(LINES[::-1])[::-1]
    assert [t.source for t in got] == LINES
    for one, two in zip(got, expected, strict=True):
        assert one.tokens == two.tokens and one.text == two.text
        assert one.score == pytest.approx(two.score, abs=1e-4)


def test_n_best_is_sorted_and_begins_with_the_best(translator):
    best, ranked = translator.translate(LINES[:5]), translator.translate(LINES[:5], nbest=5)
    for one, several in zip(best, ranked, strict=True):
        scores = [h.score for h in several.hypotheses]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert several.text == one.text and several.score == pytest.approx(one.score, abs=1e-4)
    for nbest in (0, 6):
        with pytest.raises(TranslationError, match=f"`nbest` must be in 1 … `beam` = 5, got {nbest}"):
            translator.translate(LINES, nbest=nbest)


def test_lines_that_cannot_be_translated_do_not_stop_the_others(translator):
    lines = [LINES[0], b"gr\xfcn", "a\0b", "", " \t\u2028 ", LINES[1].encode() + b"\r\n", "a " * 64, "\ud800"]
    got = translator.translate(lines)
    good = translator.translate(LINES[:2])
    assert (got[0].text, got[5].text) == (good[0].text, good[1].text)
    assert got[5].source == LINES[1]
    problems = [t.problem for t in got]
    assert [i for i, problem in enumerate(problems) if problem is None] == [0, 3, 4, 5]
    assert problems[1] == "not UTF-8: byte 0xfc at 3" and "NUL" in problems[2] and "surrogate" in problems[7]
    assert problems[6] == "too long: 64 pieces, the model takes 63"
    assert all(got[i].text == "" and got[i].score is None and got[i].tokens == () for i in (1, 2, 3, 4, 6, 7))
    assert translator.translate(["a " * 63])[0].problem is None
    assert translator.translate([]) == []


def test_one_text_in_the_place_of_lines_is_refused(translator):
    with pytest.raises(TypeError, match="a list of lines, got one str"):
        translator.translate("ein Satz")
    with pytest.raises(TypeError, match="str or bytes, got int"):
        translator.translate([3])


def test_progress_counts_every_line_once(translator):
    counted = []
    translator.translate([*LINES, "", b"\xff"], progress=counted.append)
    assert sum(counted) == len(LINES) + 2


def test_words_of_the_text_are_never_fairseqs_own_symbols(checkpoints):
    """ "</s>" in a text is an unknown word, not the end of the sentence."""
    translator = Translator(checkpoints["dynamicconv"], tokenizer="none", bpe_codes="none", **SHORT)
    indices, problem, _ = translator._opened.encode("hund </s> <pad> <s> hund")
    own = {translator._opened.source.pad(), translator._opened.source.bos(), translator._opened.source.eos()}
    assert problem is None and len(indices) == 6 and not own & set(indices[:-1])
    assert indices[-1] == translator._opened.source.eos()


def test_unknown_words_are_written_as_asked(checkpoints):
    options = {"unkpen": -30.0, **SHORT}
    as_is, named, out = (Translator(checkpoints["dynamicconv"], **options, **unk).translate(LINES[:2])
                         for unk in ({}, {"unk": "(?)"}, {"unk": ""}))  # fmt: skip
    for a, b, c in zip(as_is, named, out, strict=True):
        assert a.tokens == b.tokens == c.tokens and "<unk>" in a.text
        assert "<unk>" not in b.text and "(?)" in b.text.replace(" ", "") and "unk" not in c.text


@pytest.mark.parametrize("unk", ["\udcff", "a\0", "a\nb", "\r"])
def test_what_cannot_be_written_for_an_unknown_word(unk, checkpoints):
    with pytest.raises(TranslationError, match="`unk` must be text of one line in UTF-8, got"):
        Translator(checkpoints["dynamicconv"], unk=unk)


@pytest.mark.parametrize("options", [{"lenpen": 1000.0}, {"lenpen": -1000.0}, {"max_len_a": 1e308, "max_len_b": 3}])
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_numbers_beyond_all_lengths(kind, options, checkpoints):
    with searching(kind), Translator(checkpoints["dynamicconv"], **options) as translator:
        (found,) = translator.translate(LINES[:1])
        assert found.text
        if "lenpen" in options:
            assert translator.score(LINES[:1], [found.text])[0].score is not None


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_numbers_of_numpy(kind, checkpoints):
    given = {"lenpen": 0.5, "unkpen": 0.25, "temperature": 1.5, "max_len_a": 2.0}
    with searching(kind), Translator(checkpoints["dynamicconv"], **given) as translator:
        expected = translator.translate(LINES[:2])
    numbers = {name: np.float32(number) for name, number in given.items()}
    with searching(kind), Translator(checkpoints["dynamicconv"], **numbers) as translator:
        assert translator.translate(LINES[:2]) == expected


def test_a_folder_whose_name_means_several_to_fairseq(checkpoints, data, tmp_path):
    shutil.copytree(data, tmp_path / "a:b")
    with pytest.raises(TranslationError, match=r"`data` .*a:b has a colon, which separates folders in fairseq"):
        Translator(checkpoints["dynamicconv"], tmp_path / "a:b")


def test_a_model_trained_on_cut_texts_gets_them_cut(data, tmp_path):
    path = toys.make_checkpoint(tmp_path / "m.pt", data, seed=1, task={"truncate_source": True})
    translator = Translator(path, **SHORT)
    long, cut = translator.translate(["haus " * 80, "haus " * 10])
    assert long.problem is None and cut.problem is None
    assert len(translator._opened.encode("haus " * 80)[0]) == 64
    assert (long.cut, cut.cut) == (True, False)
    scored = translator.score(["haus " * 80, "haus " * 10], ["Two men"] * 2)
    assert [one.cut for one in scored] == [True, False]
    assert len(translator.fit("Haus " * 150)) == 8, "halves, as of any model: nothing of running text is lost"


def test_what_goes_wrong_with_a_batch_is_said(translator, checkpoints, monkeypatch):
    limited = Translator(checkpoints["dynamicconv"], min_len=9, max_len_a=1.0, max_len_b=2)
    with pytest.raises(TranslationError, match="`min_len` must be at most the maximum length, here "):
        limited.translate(["Hund"])

    def fail(source):
        raise error

    monkeypatch.setattr(translator._search, "search", fail)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(TranslationError, match=r"out of memory on a batch of 2 × \d+ pieces: reduce `batch_tokens`"):
        translator.translate(["Hund", "Haus"])
    error = torch.OutOfMemoryError("the native search's")
    with pytest.raises(TranslationError, match=r"out of memory on a batch of 2 × \d+ pieces: reduce `batch_tokens`"):
        translator.translate(["Hund", "Haus"])
    error = NoHypothesisError("of sentence 1")
    with pytest.raises(TranslationError, match="the model gives no translation a probability: are its weights NaN"):
        translator.translate(["Hund", "Haus"])
    error = ValueError("beam_size must be below the 9 words")
    with pytest.raises(TranslationError, match="`beam` must be below the 9 words"):
        translator.translate(["Hund"])
    error = RuntimeError("cannot start 99 threads: Resource temporarily unavailable")
    with pytest.raises(TranslationError, match="`threads`: cannot start 99 threads"):
        translator.translate(["Hund"])
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        translator.translate(["Hund"])
    monkeypatch.setattr(Scorer, "_scores", lambda self, sources, targets: fail(sources))
    with pytest.raises(RuntimeError, match="a bug"):
        translator.score(["Hund"], ["dog"])
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(TranslationError, match=r"out of memory on a batch of 1 × \d+ pieces: reduce `batch_tokens`"):
        translator.score(["Hund"], ["dog"])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=repr
)
def test_a_model_without_room_on_its_device(error, checkpoints, monkeypatch):
    def fail(self, device):
        raise error

    monkeypatch.setattr(torch.nn.Module, "to", fail)
    with pytest.raises(TranslationError, match="out of memory for the model on `device` 'cpu': give another `device`"):
        Translator(checkpoints["dynamicconv"])


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_repetitions_that_leave_no_word(kind, checkpoints):
    said = "near 0, or is no word left with `no_repeat_ngram_size` = 1 and `min_len` = 60?"
    with searching(kind), pytest.raises(TranslationError, match=re.escape(said)):
        Translator(checkpoints["dynamicconv"], no_repeat_ngram_size=1, min_len=60).translate(["Hund"])


def test_batches():
    lengths = dict(enumerate([5, 1, 9, 3, 3, 30, 2, 1]))
    sentences = {i: [0] * n for i, n in lengths.items()}
    for tokens, size in ((10, None), (1, None), (1000, 3), (1000, None)):
        batches = make_batches(sentences, tokens, size)
        assert sorted(i for batch in batches for i in batch) == list(lengths)
        widths = [max(lengths[i] for i in batch) for batch in batches]
        assert widths == sorted(widths, reverse=True)
        for batch, width in zip(batches, widths, strict=True):
            assert len(batch) == 1 or (len(batch) * width <= tokens and len(batch) <= (size or len(batch)))
    assert make_batches({}, 10, None) == []
