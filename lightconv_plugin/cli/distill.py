"""`lightconv distill`: training text for a student, translated by a teacher."""

import argparse
import inspect
import os
import shlex
from pathlib import Path

from lightconv_plugin.arguments import add_force, folder, folder_as_typed, positive, ratio
from lightconv_plugin.cli.interruptible import interruptible
from lightconv_plugin.cli.search_options import add_search_options, add_speed_options
from lightconv_plugin.quiet import quietly

DESCRIPTION = """\
Sequence-level knowledge distillation (Kim & Rush 2016): translates the source side of a training text by beam search
with a teacher, and makes a prepared folder whose training text has these translations as its target side. A student, a
smaller model, is trained on it. Validation and test text stay as they are.

TEACHER is a model as for `lightconv translate`; several are an ensemble. DATA is a folder that `lightconv prepare` made
with the teacher's merges and dictionaries. The new folder keeps them.

The text is translated in blocks. Rerun the same command to resume: on a CPU, the result is the same, byte for byte,
with any number of workers. --force is needed if OUT was made with another teacher or other options of the search. Other
limits for the pairs that are kept need no new translations."""
EXAMPLE = """\
example:
  lightconv distill runs/multi30k_en_de/dynamicconv/average10.pt data/multi30k_en_de
  lightconv train multi30k_en_de/student/dynamicconv

  lightconv distill teacher1 teacher2 data/mine --beam 8 --nbest 8 --workers 4 --out data/mine_nbest"""


def run(args: argparse.Namespace) -> int:
    return interruptible("distill", lambda: _distill(args))


def _distill(args: argparse.Namespace) -> None:
    from lightconv_plugin.recipes.environment import compute_here

    compute_here()
    with quietly():
        from lightconv_plugin.generation.translator import Translator
    from lightconv_plugin.progress import say
    from lightconv_plugin.recipes.distillation.choosing import Limits
    from lightconv_plugin.recipes.distillation.run import Job, distill
    from lightconv_plugin.recipes.distillation.teacher import Teacher
    from lightconv_plugin.released.cache import resolve

    paths = tuple(Path(os.path.abspath(resolve(path))) for path in args.path)
    options = {name: getattr(args, name) for name in inspect.signature(Translator).parameters if hasattr(args, name)}
    for name in ("path", "data"):
        del options[name]
    job = Job(
        Teacher(paths, options, args.nbest),
        args.data,
        args.out,
        Limits(args.max_ratio, args.max_repeats),
        args.workers,
        args.force,
    )
    done = distill(job)
    say(f"{done.kept:,} training pairs in {done.out}; a student on them:")
    say("  " + shlex.join(["lightconv", "train", "CONFIG", f"task.data={done.out / 'data-bin'}"]))


def add_parser(commands) -> None:
    parser = commands.add_parser("distill", description=DESCRIPTION, epilog=EXAMPLE)
    parser.add_argument(
        "path", nargs="+", metavar="TEACHER",
        help="a directory written by lightconv export, a fairseq checkpoint, or a name of lightconv released; several "
        "of one kind: an ensemble",
    )  # fmt: skip
    parser.add_argument("data", type=folder_as_typed, metavar="DATA", help="the prepared folder")
    parser.add_argument("--out", type=folder, metavar="OUT", help="the folder to fill (default: DATA_distilled)")
    add_force(parser, "what another teacher or other options left in OUT")
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N",
        help="processes that translate, each with its own copy of the teacher; they share the cores and, with --device "
        "cuda, the GPUs (default: %(default)s)",
    )  # fmt: skip
    text = parser.add_argument_group("which translations are used")
    text.add_argument(
        "--nbest", type=positive, default=1, metavar="N",
        help="of the N best translations, take the one with the highest sentence BLEU against the target side of DATA "
        "(default: %(default)s, the best by the teacher's score)",
    )  # fmt: skip
    text.add_argument(
        "--max-ratio", type=ratio, default=3.0, metavar="R",
        help="drop pairs with a larger ratio of their lengths in subwords (default: %(default)g)",
    )  # fmt: skip
    text.add_argument(
        "--max-repeats", type=positive, default=3, metavar="N",
        help="drop translations in which a phrase occurs more than N times in a row, unless the source repeats one as "
        "often (default: %(default)s)",
    )  # fmt: skip
    add_search_options(parser)
    add_speed_options(parser)
