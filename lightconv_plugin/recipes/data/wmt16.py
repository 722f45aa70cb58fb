"""From Google's WMT16 En-De, already tokenised and encoded, to fairseq's binary data.

bpe/       train, valid (newstest2013) and test (newstest2014) as they are in the archive, and their merges, `codes`
raw/       the raw text of valid and test, references for sacreBLEU
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from lightconv_plugin.downloads.archives import unpack
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.files import write_text
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan, Sides, Stage, scratch
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, write_lines
from lightconv_plugin.recipes.data.wmt_sources import expect, same_length
from lightconv_plugin.text.recipe import Recipe

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
    """Fill the folders `bpe` and `raw` from the archive."""
    bpe.mkdir()
    raw.mkdir()
    # Required files are given by name. Optional ones are given by patterns that also match a required file.
    members = [f"{stem}.{lang}" for stem in ENCODED.values() for lang in LANGS]
    with scratch(bpe.with_name(".unpacked")) as folder:
        unpack(archive, folder, [*members, "newstest201[34].*", "*bpe.32000*"], LIMIT)
        for split, stem in ENCODED.items():
            what, (source, target) = f"{split} in {ARCHIVE}", (folder / f"{stem}.{lang}" for lang in LANGS)
            expect(same_length(source, target, what), PAIRS[split], what, any_size)
            for path, lang in zip((source, target), LANGS, strict=True):
                os.replace(path, bpe / f"{split}.{lang}")
        if (folder / "bpe.32000").is_file():
            os.replace(folder / "bpe.32000", bpe / "codes")
        made = []
        for split, name in SETS.items():
            for lang in LANGS:
                if not reference(folder / f"{name}.{lang}", bpe / f"{split}.{lang}", raw / f"{split}.{lang}"):
                    made.append(f"{split}.{lang}")
    write_text(raw / "origin.json", json.dumps({"detokenised": made}) + "\n")


def reference(text: Path, encoded: Path, output: Path) -> bool:
    """Move the raw text of a test set to `output`, or make it by detokenising; False if it was made."""
    if not text.is_file():
        detokenise(encoded, output, text.suffix[1:])
        return False
    if count_lines(text) != count_lines(encoded):
        counts = f"{count_lines(text):,} lines, {encoded.name} {count_lines(encoded):,}"
        raise CorpusError(f"{text.name} in {ARCHIVE} has {counts}")
    os.replace(text, output)
    return True


def about(sides: Sides) -> Mapping[str, object]:
    """The content of corpus.json."""
    made = json.loads((sides.out / "raw/origin.json").read_text(encoding="utf-8"))["detokenised"]
    if made:
        say(f"  the archive has no raw text of {', '.join(made)}: it was made by detokenising, so sacreBLEU is not")
        say("  quite comparable; `sacrebleu -t wmt14/full -l en-de` has the true references of the test set")
    recipes = {lang: Recipe("moses", lang) for lang in LANGS}  # as far as is known about the archive
    return sides.about(ENCODED, False, 32_000, recipes, joined_dictionary=True, raw_by_detokenising=made)


def plan(request: Request) -> Plan:
    """The stages from the archive to binary data."""
    out, archive, any_size = request.out, request.data / ARCHIVE, request.options.any_size
    sides = Sides(out, LANGS, request.options.workers)
    words = [option for side in ("src", "tgt") for option in (f"--nwords{side}", str(WORDS))]
    stages = [
        Stage(
            "text",
            "text of the archive",
            lambda bpe, raw: extract(archive, bpe, raw, any_size),
            [archive],
            [out / "bpe", out / "raw"],
        ),
        sides.binarised(True, {"words": WORDS}, extra=words),
    ]
    return Plan(out, stages, lambda: about(sides))
