"""From Google's WMT16 En-De, already tokenised and encoded, to fairseq's binary data, in resumable steps.

bpe/       train, valid (newstest2013) and test (newstest2014) as they are in the archive, and their merges, `codes`
raw/       the raw text of valid and test, references for sacreBLEU
data-bin/  what fairseq-train reads
corpus.json  languages, and the sources of each part and of the raw text
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from lightconv_plugin.recipes.data.archives import unpack
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, write_lines
from lightconv_plugin.recipes.data.wmt_sources import expect, same_length
from lightconv_plugin.recipes.steps import Steps, remove, say, write_text
from lightconv_plugin.text.recipe import Recipe

ABOUT = """WMT16 English → German as both papers use it: 4.5 million pairs, prepared by Google

--data is a folder with wmt16_en_de.tar.gz. Written: bpe/ raw/ data-bin/

The archive is on Google Drive, which requires a resource key for files as old as this one, or a
signed-in browser, and may no longer have it: if the download fails, get it elsewhere and name its
folder with --data. Its SHA-256 and its 4,500,966 pairs are known from one other program that uses
it (a Julia package's DataDeps).

Nothing is tokenised here. Training text: train.tok.clean.bpe.32000; validation: newstest2013;
test: newstest2014; one dictionary of 32,768 for both languages. The raw references for sacreBLEU
are the archive's newstest2014.de; if it lacks them, they are made by detokenising, and a message
says so.

Free disk space: archive 0.6 GB; text 4.5 M x 2 x 170 bytes = 1.5 GB; binary 4.5 M x 2 x 30 pieces
x 2 bytes = 0.5 GB, and as much while it is written: 4 GiB with the archive. (The bytes of a line
are an estimate.)
"""
ARCHIVE = "wmt16_en_de.tar.gz"
LANGS = ("en", "de")
SETS = {"valid": "newstest2013", "test": "newstest2014"}
ENCODED = {"train": "train.tok.clean.bpe.32000"} | {split: f"{name}.tok.bpe.32000" for split, name in SETS.items()}
PAIRS = {"train": 4_500_966, "valid": 3000, "test": 3003}
WORDS = 32_768  # dictionary size; the paper's 213M parameters assume it
LIMIT = 4 << 30  # bytes to unpack at most


def detokenise(encoded: Path, output: Path, lang: str) -> None:
    """Undo byte-pair encoding and tokenisation, as far as possible."""
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(lang=lang)
    words = ((line + " ").replace("@@ ", "").split() for line in iter_lines(encoded))
    write_lines(output, (moses.detokenize(line) for line in words))


def extract(archive: Path, bpe: Path, raw: Path, any_size: bool) -> None:
    """Fill the folders `bpe` and `raw` from the archive.

    Raises:
        CorpusError: the archive is damaged or lacks a file, or a part has an unexpected number of lines.
    """
    scratch = bpe.with_name(".unpacked")
    remove(scratch)
    bpe.mkdir()
    raw.mkdir()
    # Required files are given by name. Optional ones are given by patterns that also match a required file.
    members = [f"{stem}.{lang}" for stem in ENCODED.values() for lang in LANGS]
    unpack(archive, scratch, [*members, "newstest201[34].*", "*bpe.32000*"], LIMIT)
    for split, stem in ENCODED.items():
        source, target = (scratch / f"{stem}.{lang}" for lang in LANGS)
        expect(same_length(source, target, f"{split} in {ARCHIVE}"), PAIRS[split], f"{split} in {ARCHIVE}", any_size)
        for path, lang in zip((source, target), LANGS, strict=True):
            os.replace(path, bpe / f"{split}.{lang}")
    if (scratch / "bpe.32000").is_file():
        os.replace(scratch / "bpe.32000", bpe / "codes")
    made = []
    for split, name in SETS.items():
        for lang in LANGS:
            path, encoded = scratch / f"{name}.{lang}", bpe / f"{split}.{lang}"
            if not path.is_file():
                detokenise(encoded, raw / encoded.name, lang)
                made.append(f"{split}.{lang}")
            elif count_lines(path) == count_lines(encoded):
                os.replace(path, raw / encoded.name)
            else:
                counts = f"{count_lines(path):,} lines, {encoded.name} {count_lines(encoded):,}"
                raise CorpusError(f"{path.name} in {ARCHIVE} has {counts}")
    write_text(raw / "origin.json", json.dumps({"detokenised": made}) + "\n")
    remove(scratch)


def add_options(parser: argparse.ArgumentParser) -> None:
    """No options: the archive is already tokenised and encoded."""


def run(request: Request) -> None:
    """Run all steps."""
    out, archive = request.out, request.data / ARCHIVE
    bpe, raw = out / "bpe", out / "raw"
    with Steps(out) as steps:
        steps.run(
            "text",
            "text of the archive",
            lambda to_bpe, to_raw: extract(archive, to_bpe, to_raw, request.any_size),
            inputs=[archive],
            outputs=[bpe, raw],
            params={},
        )
        made = json.loads((raw / "origin.json").read_text(encoding="utf-8"))["detokenised"]
        if made:
            say(f"  the archive has no raw text of {', '.join(made)}: it was made by detokenising, so sacreBLEU is not")
            say("  quite comparable; `sacrebleu -t wmt14/full -l en-de` has the true references of the test set")
        sides = [option for side in ("src", "tgt") for option in (f"--nwords{side}", str(WORDS))]
        steps.run(
            "data-bin",
            "binarise",
            lambda output: binarise_pairs(out, *LANGS, tuple(ENCODED), True, request.workers, output, sides),
            inputs=[bpe / f"{split}.{lang}" for split in ENCODED for lang in LANGS],
            outputs=[out / "data-bin"],
            params={"words": WORDS},
        )
        about = {
            "src": LANGS[0],
            "tgt": LANGS[1],
            "splits": ENCODED,
            "lowercase": False,
            "bpe": 32_000,
            "joined_dictionary": True,
            "raw_by_detokenising": made,
            "text": {lang: Recipe("moses", lang).as_json() for lang in LANGS},  # as far as is known about the archive
        }
        write_text(out / "corpus.json", json.dumps(about, indent=1) + "\n")
