"""Subwords: encoders against their libraries' commands, joining against fairseq's own, telling the kinds apart."""

import io
import random
import sys

import pytest

from lightconv_plugin.text.subwords import bpe_encoder, fits, join, kind_of, sentencepiece_encoder
from tests import programs

TEXT = "the lower the newer lowest newest slower"


@pytest.fixture
def codes(tmp_path):
    from subword_nmt.learn_bpe import learn_bpe

    with (tmp_path / "codes").open("w", encoding="utf-8") as file:
        learn_bpe(io.StringIO(f"{TEXT}\n" * 3), file, 12)
    return tmp_path / "codes"


def test_bpe_is_that_of_the_command(codes):
    command = [sys.executable, "-m", "subword_nmt.apply_bpe", "-c", codes]
    done = programs.run(*command, input=f"{TEXT}\nunseen words\n")
    encode = bpe_encoder(codes)
    assert "@@ " in done.stdout
    assert [encode(TEXT), encode("unseen words")] == done.stdout.splitlines()


@pytest.mark.parametrize("content", ["these are not merges\n", "#version: 0.2\none\n", b"\xff\xfe"])
def test_files_without_merges_are_refused(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="file is not a file of merges"):
        bpe_encoder(path)


@pytest.mark.parametrize("content", [b"", b"no model", bytes(range(256))])
def test_files_that_are_no_sentencepiece_model_are_refused(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="file is not a model of sentencepiece"):
        sentencepiece_encoder(path)


@pytest.mark.parametrize(
    "pieces, kind",
    [
        ("un@@ glaub@@ lich , nicht", "bpe"),
        ("ein Wort@@", "bpe"),
        ("@@ x @@", "bpe"),
        ("▁un glaub lich ▁", "sentencepiece"),
        ("▁ ▁a b ▁c", "sentencepiece"),
        ("plain words", "words"),
        ("", "words"),
    ],
)
def test_join_equals_fairseqs_remove_bpe(pieces, kind):
    pytest.importorskip("fairseq")
    from fairseq.data.data_utils import post_process

    symbol = {"bpe": "@@ ", "sentencepiece": "sentencepiece", "words": None}[kind]
    assert join(pieces.split(), kind) == (post_process(pieces, symbol) if symbol else pieces)


@pytest.fixture(scope="module")
def with_bytes():
    """A processor of sentencepiece whose model has pieces for the bytes of unknown characters."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "they stand in the low grass"] * 20), model_writer=model, vocab_size=300,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("text", ["the lower 月", "Straße é", "😀 they 😀", "月月 low", "x"])
def test_bytes_become_characters(text, with_bytes):
    pieces = with_bytes.encode(text, out_type=str)
    assert any(piece.startswith("<0x") for piece in pieces)
    assert join(pieces, "sentencepiece") == join([" ".join(pieces)], "sentencepiece") == text


def test_join_equals_sentencepieces_decoding(with_bytes):
    draw = random.Random(1)
    known = [with_bytes.id_to_piece(i) for i in range(3, with_bytes.get_piece_size())]
    starts = [[f"<0x{byte:02X}>" for byte in character.encode()] for character in "é月😀▁\x1f\x7f \n\r"]
    for _ in range(500):
        runs = draw.choices([*([piece] for piece in known), *starts * 10], k=draw.randint(1, 8))
        pieces = [piece for run in runs for piece in run[: draw.randint(1, 4)]]
        expected = with_bytes.decode(pieces).replace("\n", " ").replace("\r", " ").strip()
        assert join(pieces, "sentencepiece") == expected, pieces
    # Nothing else is a byte: a longer piece, lower case, a plain word of a text without subwords.
    for pieces in (["▁<0x41>b", "c"], ["<0xe6>"], ["<0x4>"]):
        assert join(pieces, "sentencepiece") == "".join(pieces).strip("▁")
    assert join(["<0x41>"], "words") == join(["<0x41>"], "bpe") == "<0x41>"


ENGLISH = [TEXT, "they stand in the low grass"]
GERMAN = ["die niedrigere Zeitung lag neben der neuesten Zeitung", "wir lagen im niedrigen Gras neben der Zeitung"]


def learn(kind, lines, path):
    """Merges or a sentencepiece model of these lines."""
    if kind == "bpe":
        from subword_nmt.learn_bpe import learn_bpe

        with path.open("w", encoding="utf-8") as file:
            learn_bpe(io.StringIO("\n".join(lines * 20)), file, 30)
    else:
        sentencepiece = pytest.importorskip("sentencepiece")
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines * 20), model_writer=file, vocab_size=60, hard_vocab_limit=False,
                minloglevel=2,
            )  # fmt: skip
    return path


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_a_file_of_another_language_does_not_fit_a_dictionary(kind, tmp_path):
    texts = {"en": ENGLISH, "de": GERMAN, "joint": [*ENGLISH, *GERMAN]}
    files = {name: learn(kind, lines, tmp_path / name) for name, lines in texts.items()}
    for name, lang, other in (("en", "en", "de"), ("de", "de", "en"), ("joint", "en", "de"), ("joint", "de", "en")):
        encode = (bpe_encoder if kind == "bpe" else sentencepiece_encoder)(files[name])
        # Characters that the file does not know are entries, too.
        entries = {
            *encode(" ".join([*texts[lang], "unseen lowering niederes 月月 Ω"])).split(),
            "madeupword0000",
            "<lang:de>",
        }
        assert fits(files[name], kind, entries) and not fits(files[other], kind, entries)


def test_the_kind_of_a_dictionary():
    plain = [f"word{i}" for i in range(1000)]
    assert kind_of(plain) == kind_of([]) == kind_of([*plain, "me@@", "▁", "@@"]) == "words"
    assert kind_of([*plain, *(f"x{i}@@" for i in range(20)), "▁a"]) == kind_of([*plain[:99], "x@@"]) == "bpe"
    assert kind_of([*plain, *(f"▁x{i}" for i in range(20)), "a@@"]) == "sentencepiece"
