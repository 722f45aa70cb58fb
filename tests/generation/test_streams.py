"""Streams of lines, running text and given translations: the same results as line by line, in order."""

import io
import random
import re
from dataclasses import replace

import pytest

pytest.importorskip("fairseq")

from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation.translator import Translator
from tests.generation import translation_toys as toys

LINES = toys.lines(9, seed=8)
PUNCTUATION = re.compile("[.,!?]")
SHORT = {"max_len_b": 12}


@pytest.fixture(scope="module")
def translator(checkpoints):
    with Translator(checkpoints["dynamicconv"], **SHORT) as translator:
        yield translator


def texts(translations):
    return [translation.text for translation in translations]


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_stream_is_translated_in_order_and_read_window_by_window(window, translator):
    read = []
    lines = [*LINES, "", b"\xff"]
    stream = translator.translate_stream((read.append(line) or line for line in lines), window=window)
    assert read == []
    found = [next(stream)]
    assert len(read) == min(window, len(lines))
    found += stream
    assert texts(found) == texts(translator.translate(lines)) and found[-1].problem is not None


def test_each_finished_line_is_told_once(translator):
    told = {}
    found = translator.translate([*LINES, "", b"\xff"], 2, finished=lambda number, one: told.setdefault(number, one))
    assert [told[number] for number in range(len(told))] == found


def test_wrong_arguments_of_a_stream_are_refused_before_it_is_read(translator):
    with pytest.raises(TranslationError, match="`window` must be a whole number of at least 1, got 0"):
        translator.translate_stream(LINES, window=0)
    with pytest.raises(TranslationError, match="`nbest` must be in 1 … `beam` = 5, got 6"):
        translator.translate_stream(LINES, 6)
    with pytest.raises(TranslationError, match=r"`nbest` must be a whole number, got 2\.0"):
        translator.translate_stream(LINES, 2.0)
    with pytest.raises(TypeError, match="a list of lines, got one str"):
        translator.translate_stream("ein Satz")


# ------------------------------------------------------------------------------------------------- running text


def document(sentences, rng):
    """The sentences in lines of running text, some of them empty, and the sentences of each line."""
    lines = []
    while sentences:
        count = rng.randint(0, 5)
        lines.append(sentences[:count])
        sentences = sentences[count:]
    return lines


def chunks(content: bytes, rng):
    stream = io.BytesIO(content)
    return iter(lambda: stream.read(rng.randint(1, 30)), b"")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["\n", "\r\n", ""], ids=["lf", "crlf", "none"])
def test_a_document_is_its_sentences_one_by_one(end, seed, translator):
    pytest.importorskip("sentencex")
    rng = random.Random(seed)
    lines = document([f"Zwei {PUNCTUATION.sub('', line)}." for line in toys.lines(12, seed, longest=5)], rng)
    expected = [" ".join(texts(translator.translate(sentences))) for sentences in lines]
    content = (end or "\n").join(" ".join(sentences) for sentences in lines) + end
    content = b"\xef\xbb\xbf" + content.encode() if seed else content.encode()
    found = list(translator.translate_document(chunks(content, rng), window=rng.choice([1, 3, 100])))
    written = "".join(part.written for part in found)
    if not end and not lines[-1]:  # nothing after the last line end is no line
        expected.pop()
    assert written == "".join(f"{line}\n" for line in expected)
    assert [part.part.line for part in found] == sorted(part.part.line for part in found)


def test_sentences_that_do_not_fit_are_cut_and_bad_ones_left_out(translator):
    pytest.importorskip("sentencex")
    long = "Haus " * 150
    content = f"Zwei Männer. {long.strip()}. ".encode() + b"Gr\xfcn. " + b"Zwei.\n"
    found = list(translator.translate_document([content]))
    assert translator.translate([long])[0].problem == "too long: 450 pieces, the model takes 63"
    parts = translator.fit(f"{long.strip()}.")
    assert len(parts) == 8 and " ".join(parts) == f"{long.strip()}."
    assert [part.part.cut for part in found] == [False, True, *[False] * 9]
    assert [part.translation.problem is None for part in found] == [*[True] * 9, False, True]
    assert found[9].translation.problem == "not UTF-8: byte 0xfc at 3" and found[9].written == ""
    good = texts(translator.translate(["Zwei Männer.", *parts, "Zwei."]))
    assert "".join(part.written for part in found) == " ".join(good) + "\n"


def test_the_memory_for_a_line_does_not_grow_with_it(translator, monkeypatch):
    """What is read ahead of what is written stays bounded, whatever the length of the line."""
    pytest.importorskip("sentencex")
    read = written = 0
    ahead = []

    def source():
        nonlocal read
        for _ in range(150):
            chunk = "Zwei Männer sehen das große Haus. " * 20
            read += len(chunk)
            yield chunk

    def instead(lines, nbest):
        yield {number: one(line) for number, line in enumerate(lines)}

    from lightconv_plugin.generation.translations import Hypothesis, Translation

    def one(line):
        return Translation(line, (Hypothesis(line, -1.0, ()),))

    monkeypatch.setattr(translator, "_translated", instead)
    for part in translator.translate_document(source(), window=50):
        written += len(part.written)
        ahead.append(read - written)
    assert read - written in (0, 1) and read > 100_000
    assert max(ahead) <= 2 * 20_000 + 51 * 40 + 700


# ------------------------------------------------------------------------------------------- given translations


@pytest.mark.parametrize("options", [{}, {"lenpen": 0.3, "temperature": 1.4, "unkpen": -2.0}], ids=["plain", "options"])
@pytest.mark.parametrize("names", [["dynamicconv"], ["dynamicconv", "transformer"]], ids=["one", "ensemble"])
def test_a_given_translation_has_the_score_that_the_search_gave_it(names, options, checkpoints):
    """Words that are split already, so that the text of a translation is its pieces."""
    given = {"tokenizer": "none", "bpe_codes": "none", "unk": "?", **SHORT, **options}
    with Translator([checkpoints[name] for name in names], **given, batch_size=4) as translator:
        found = translator.translate(LINES, nbest=3)
        pairs = [(one.source, hypothesis) for one in found for hypothesis in one.hypotheses]
        scored = translator.score([source for source, _ in pairs], [" ".join(h.tokens) for _, h in pairs])
    assert len(pairs) == 3 * len(LINES)
    assert [one.tokens for one in scored] == [hypothesis.tokens for _, hypothesis in pairs]
    assert [one.score for one in scored] == pytest.approx([h.score for _, h in pairs], abs=1e-4)


def test_references_are_split_as_the_target_language_is(translator, data):
    (one,) = translator.score([LINES[0]], ["We don't see the BIG house!"])
    pieces = toys.bpe(data)(replace(toys.RECIPE, lang="en").tokenise()("We don't see the BIG house!")).split()
    words = translator._opened.target
    assert one.tokens == tuple(words[words.index(piece)] for piece in pieces)
    assert one.text == "We don't see the BIG house!" and one.score < 0


def test_lines_that_cannot_be_scored_do_not_stop_the_others(translator):
    lines = [LINES[0], "", "", LINES[1], b"\xff", LINES[2], LINES[3], "a " * 64, "\1", "\1"]
    references = ["Two men", "", "Two men", "", "Two men", b"\xff", "dog " * 64, "Two men", "Two men", ""]
    counted = []
    found = translator.score(lines, references, counted.append)
    assert [one.problem for one in found] == [
        None, None, "empty, but its reference is not", None, "not UTF-8: byte 0xff at 1",
        "the reference is not UTF-8: byte 0xff at 1", found[6].problem, "too long: 64 pieces, the model takes 63",
        "without a word, but its reference is not", None,
    ]  # fmt: skip
    assert found[6].problem.startswith("the reference is too long: ")
    assert found[1].score is None and found[3].score < 0 and found[3].tokens == () and sum(counted) == len(lines)
    [alone] = translator.score(lines[:1], references[:1])
    assert found[0].tokens == alone.tokens and found[0].score == pytest.approx(alone.score, rel=1e-5)
    with pytest.raises(TranslationError, match="`references` must be one for each of 10 lines, got 1"):
        translator.score(lines, references[:1])


@pytest.mark.parametrize("temperature", [1e-40, 1e-60])
def test_a_score_that_is_nan_is_an_error_as_of_a_translation(temperature, checkpoints):
    why = "are its weights NaN, or is `temperature` near 0?"
    with Translator(checkpoints["dynamicconv"], temperature=temperature, **SHORT) as translator:
        with pytest.raises(TranslationError, match=re.escape(f"the model gives no translation a probability: {why}")):
            translator.translate(LINES[:1])
        with pytest.raises(TranslationError, match=re.escape(f"the model gives a reference no probability: {why}")):
            translator.score(LINES[:2], ["Two men", "Two men"])
