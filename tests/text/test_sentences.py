"""Sentences of running text: the same however it comes, none lost, none too long, nothing kept of what is done."""

import random

import pytest

pytest.importorskip("sentencex")

from lightconv_plugin.text.sentences import SentenceStream, halves, segmenter, separator

SOME = ["Dr. Müller kam am 3. Mai.", "Er sagte z.B. nichts!", "Warum?", "Das ist 3.5 m lang.", "Na ja ...", "Ende."]


def text_of(number: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(SOME, k=number))


def streamed(text: str, rng: random.Random, longest: int) -> list[str]:
    stream, found = SentenceStream(segmenter("de"), longest), []
    while text:
        size = rng.randint(1, 90)
        found += stream.feed(text[:size])
        text = text[size:]
    return found + stream.end()


def test_abbreviations_and_dates_end_no_sentence():
    assert [sentence.strip() for sentence in segmenter("de_DE")(" ".join(SOME[:3]))] == SOME[:3]
    assert [sentence.strip() for sentence in segmenter("zh")("今天天气很好。我们去公园吧！")] == [
        "今天天气很好。",
        "我们去公园吧！",
    ]


def test_what_is_no_text_keeps_its_place():
    text = "Eins \udcff zwei. Drei \udcfe."
    assert [sentence.strip() for sentence in segmenter("de")(text)] == ["Eins \udcff zwei.", "Drei \udcfe."]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_has_the_sentences_of_the_whole_text(seed):
    text = text_of(60, seed)
    whole = [sentence.strip() for sentence in segmenter("de")(text)]
    assert streamed(text, random.Random(seed), longest=200) == whole


@pytest.mark.parametrize("longest", [1, 7, 40])
@pytest.mark.parametrize("text", [text_of(9), "ohne Satzende " * 30, "x" * 333, "a. " * 99, " \t "], ids=range(5))
def test_nothing_is_lost_and_nothing_too_long_however_it_comes(text, longest):
    found = streamed(text, random.Random(1), longest)
    assert "".join(found).replace(" ", "") == "".join(text.split())
    assert all(0 < len(sentence) <= longest for sentence in found)
    assert found == streamed(text, random.Random(2), longest)


def test_little_is_kept_of_a_long_line():
    stream = SentenceStream(segmenter("de"), 500)
    for number in range(200):
        stream.feed(text_of(10, number))
        assert len(stream._rest) < 1000


def test_a_line_does_not_reach_into_the_next():
    stream = SentenceStream(segmenter("de"))
    assert stream.feed("Eins. Und") == [] and stream.end() == ["Eins.", "Und"] and stream.end() == []


def test_halves():
    assert (
        halves("aa bb cc") == ("aa bb", "cc")
        and halves("aaaa") == ("aa", "aa")
        and halves("a bbbbbbb") == ("a", "bbbbbbb")
    )


def test_between_sentences():
    assert [separator(lang) for lang in ("de", "zh_CN", "JA", "ko", "th")] == [" ", "", "", " ", ""]
    with pytest.raises(ValueError, match="longest must be at least 1, got 0"):
        SentenceStream(segmenter("de"), 0)
