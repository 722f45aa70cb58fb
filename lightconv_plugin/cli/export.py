"""`lightconv export`: write a checkpoint as a directory for `lightconv translate` and Hugging Face's transformers."""

import argparse
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from lightconv_plugin.arguments import add_force, add_text_options, positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import is_older
from lightconv_plugin.quiet import quietly

if TYPE_CHECKING:
    from lightconv_plugin.checkpoints.model_card import Score

_DTYPES = ("float32", "bfloat16", "float16", "int8")


def run(args: argparse.Namespace) -> int:
    with quietly():
        from lightconv_plugin.checkpoints.exporting import Export, export_checkpoint

        wanted = Export(**{field.name: getattr(args, field.name) for field in fields(Export)})
        score, unread = (None, ()) if args.bleu is not None else _measured(args.checkpoint)
        notes = export_checkpoint(args.checkpoint, args.directory, args.data, wanted, score=score, force=args.force)
    for note in (*notes, *unread):
        print("note: " + note.replace("`tokenizer`", "--tokenizer"))
    size = sum(path.stat().st_size for path in args.directory.iterdir() if path.is_file())
    print(f"written to {args.directory}: {size / 1e6:,.1f} MB, {args.dtype} weights")
    return 0


def _measured(checkpoint: Path) -> tuple["Score | None", tuple[str, ...]]:
    """(the score in a file that `lightconv evaluate` or `perplexity` wrote of the test set, notes about such files)."""
    from lightconv_plugin.checkpoints.model_card import Score
    from lightconv_plugin.report.scores import read_score

    notes = []
    for suffix, metric, key in (("score", "BLEU", "sacrebleu"), ("ppl", "perplexity", "perplexity")):
        path = checkpoint.parent / f"{checkpoint.name.removesuffix('.pt')}.test.{suffix}"
        if not path.is_file():
            continue
        if is_older(path, checkpoint):  # about an earlier checkpoint of this name
            notes.append(
                f"{path.name} is older than {checkpoint.name}: the model card is without it; if it is of this "
                f"checkpoint, as in a copied folder, touch {path} and export again"
            )
            continue
        try:
            found = read_score(path)
        except InputError as error:
            notes.append(f"{error}: the model card is without it")
            continue
        signatures = [detail.partition(" ")[2] for detail in found.details if detail.startswith("sacreBLEU ")]
        unit = "word" if "perplexity per word" in found.details else "token"
        if math.isfinite(value := found.values.get(key, math.nan)):
            return Score(metric, round(value, 2), next(iter(signatures), None), "test", unit), tuple(notes)
    return None, tuple(notes)


DESCRIPTION = """\
Writes the model of a checkpoint as a directory that `lightconv translate` and Hugging Face's transformers read without
fairseq: parameters (safetensors), architecture, dictionaries, merges, text preparation, and a model card.

Supports translation and language models of this plugin with every mixer, fairseq's Transformer and LightConv, and
averaged checkpoints. If a part of a model cannot be exported, the error names it. A translation model with an adaptive
softmax is exported for transformers alone. The directory is written completely or not at all."""
EPILOG = """\
--shortlist: lightconv translate uses it, unless --shortlist none is given there. transformers ignores it.

int8: matrices with at least 16,384 weights are stored in 8 bits with one scale per output; the rest is float32.

The model card (README.md) has the BLEU from CHECKPOINT.test.score, which `lightconv evaluate` writes, or the perplexity
from CHECKPOINT.test.ppl (both without .pt), if such a file exists and is not older than CHECKPOINT. Corpus and licence
are for you to fill in.

By default, dictionaries, merges, tokeniser and case are determined as in `lightconv translate`.

example:
  lightconv export runs/iwslt14_de_en/dynamicconv/average10.pt dynamicconv-de-en --lenpen 1.2"""


def add_parser(commands) -> None:
    parser = commands.add_parser("export", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the model")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory to write")
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="folder of the dictionaries")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="type of weights (default: %(default)s)")
    add_force(parser, "DIR, if it is an exported model")
    add_text_options(parser)
    search = parser.add_argument_group("default search of the exported model")
    search.add_argument("--beam", type=positive, metavar="N", help="default: 5, or 1 for a language model")
    search.add_argument("--lenpen", type=float, metavar="X", help="length penalty (default: 1)")
    search.add_argument(
        "--shortlist", type=Path, metavar="FILE",
        help="a shortlist, from lightconv shortlist, to copy into DIR: translations with DIR use it by default",
    )  # fmt: skip
    card = parser.add_argument_group("model card")
    card.add_argument("--bleu", type=float, metavar="X", help="the model's BLEU, by sacreBLEU")
    card.add_argument("--bleu-signature", metavar="TEXT", help="its sacreBLEU signature")
