"""Google's WMT16 En-De, tokenised and encoded already, to fairseq's binary data, in resumable steps.

bpe/       train, valid (newstest2013) and test (newstest2014) as they are in the archive, and their merges, `codes`
raw/       the raw text of valid and test, references for sacreBLEU
data-bin/  what fairseq-train reads
corpus.json  languages, where each part and the raw text are from
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from lightconv_plugin.recipes.data.archives import unpack
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, write_lines
from lightconv_plugin.recipes.data.wmt import positive
from lightconv_plugin.recipes.data.wmt_sources import expect, same_length
from lightconv_plugin.recipes.steps import Steps, cores, exit_status, remove, say, write_text
from lightconv_plugin.text.recipe import Recipe

ARCHIVE = "wmt16_en_de.tar.gz"
LANGS = ("en", "de")
SETS = {"valid": "newstest2013", "test": "newstest2014"}
ENCODED = {"train": "train.tok.clean.bpe.32000"} | {split: f"{name}.tok.bpe.32000" for split, name in SETS.items()}
PAIRS = {"train": 4_500_966, "valid": 3000, "test": 3003}
WORDS = 32_768  # of the dictionary; the paper's 213M parameters are with these
LIMIT = 4 << 30  # bytes unpacked


def detokenise(encoded: Path, output: Path, lang: str) -> None:
    """The text before byte-pair encoding and tokenisation, as well as it can be told."""
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(lang=lang)
    words = ((line + " ").replace("@@ ", "").split() for line in iter_lines(encoded))
    write_lines(output, (moses.detokenize(line) for line in words))


def extract(archive: Path, bpe: Path, raw: Path, any_size: bool) -> None:
    """Fill the folders `bpe` and `raw` from the archive.

    Raises:
        CorpusError: the archive is damaged or lacks a file, or a part has other numbers of lines than it should.
    """
    scratch = bpe.with_name(".unpacked")
    remove(scratch)
    bpe.mkdir()
    raw.mkdir()
    # What must be there by its name; what is only welcome by patterns that the former match too.
    members = [f"{stem}.{lang}" for stem in ENCODED.values() for lang in LANGS]
    unpack(archive, scratch, [*members, "newstest201[34].*", "*bpe.32000*"], LIMIT)
    for split, stem in ENCODED.items():
        pair = [scratch / f"{stem}.{lang}" for lang in LANGS]
        expect(same_length(*pair, f"{split} in {ARCHIVE}"), PAIRS[split], f"{split} in {ARCHIVE}", any_size)
        for path, lang in zip(pair, LANGS, strict=True):
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


def run(args: argparse.Namespace) -> None:
    out = args.out.resolve()
    archive = args.data / ARCHIVE
    bpe, raw = out / "bpe", out / "raw"
    with Steps(out) as steps:
        steps.run(
            "text",
            "text of the archive",
            lambda *folders: extract(archive, *folders, args.any_size),
            inputs=[archive],
            outputs=[bpe, raw],
            params={},
        )
        made = json.loads((raw / "origin.json").read_text(encoding="utf-8"))["detokenised"]
        if made:
            say(
                f"  the archive has no raw text of {', '.join(made)}: it was made by detokenising, and sacreBLEU is not"
            )
            say("  quite comparable; `sacrebleu -t wmt14/full -l en-de` has the true references of the test set")
        sides = [option for side in ("src", "tgt") for option in (f"--nwords{side}", str(WORDS))]
        steps.run(
            "data-bin",
            "binarise",
            lambda output: binarise_pairs(out, *LANGS, tuple(ENCODED), True, args.workers, output, sides),
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
            "text": {lang: Recipe("moses", lang).as_json() for lang in LANGS},  # by all that is known of the archive
        }
        write_text(out / "corpus.json", json.dumps(about, indent=1) + "\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"folder with {ARCHIVE}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that is filled")
    parser.add_argument("--any-size", action="store_true", help="also take another number of pairs than published")
    parser.add_argument("--workers", type=positive, default=cores(), help="processes (default: all cores)")
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)  # before anything is downloaded
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    return 0 if args.check_options else exit_status("prepare_wmt16.py", lambda: run(args))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
