"""`lightconv evaluate`: translate or summarise a test set by beam search, and score it.

Options that its parser does not know are passed to fairseq-generate.
"""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import places_first, positive
from lightconv_plugin.cli.score_options import (
    BLEU_OPTIONS,
    ROUGE_OPTIONS,
    add_bleu_options,
    add_evaluation,
    add_rouge_options,
    measuring,
    refuse,
    warner,
)
from lightconv_plugin.cli.search_options import fairseq_options
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.paths import find_config

DESCRIPTION = """\
Runs fairseq-generate on a subset and scores the result: BLEU and chrF, or ROUGE for summaries, with the number of
parameters, the sentences per second and which search it was. All other options are passed to fairseq-generate; the
defaults are --task translation_fast --beam 5 --lenpen 1 --remove-bpe --max-tokens 8000. Those to know:

{options}

The language, the raw references and the case come from the folder that `lightconv prepare` made around DATA_BIN,
unless options say otherwise. The log of fairseq-generate and the scores are written next to the checkpoint, as
CHECKPOINT.SUBSET.gen and CHECKPOINT.SUBSET.score (without .pt), and replace those of an earlier run.

@FILE inserts the arguments in a file, where # begins a comment: a path, or a name such as cnndm/generate.args. If an
option is given several times, the last one counts."""
EXAMPLE = """\
example:
  lightconv evaluate data/multi30k_en_de/data-bin runs/multi30k_en_de/dynamicconv/average10.pt --lenpen 1.2
  lightconv evaluate data/cnndm/data-bin runs/cnndm/dynamicconv/average10.pt @cnndm/generate.args"""


def run(args: argparse.Namespace) -> int:
    refused = {"bleu": ROUGE_OPTIONS, "rouge": (*BLEU_OPTIONS, "against", "samples")}
    refuse(args, refused[args.metric], f"--metric {args.metric}")
    if args.samples and not args.against:
        raise InputError("--samples needs --against FILE")
    from lightconv_plugin.recipes.environment import compute_here
    from lightconv_plugin.recipes.evaluation import evaluate

    compute_here()

    scored = evaluate(
        args.data,
        args.checkpoint,
        subset=args.subset,
        options=args.unknown,
        how=measuring(args, args.metric),
        against=args.against,
        samples=args.samples,
        as_json=args.json,
        warn=warner("evaluate"),
    )
    print(scored.text(args.json), end="")
    return 0


def with_files(argv: list[str]) -> list[str]:
    """The arguments, with each @FILE replaced by the arguments in it. Raises InputError if there is no such file."""
    expanded = []
    for argument in places_first(argv):
        if argument.startswith("@") and not argument.startswith("@@"):
            lines = read_lines(find_config(argument[1:], ".args"))
            expanded += [word for line in lines for word in line.partition("#")[0].split()]
        else:
            expanded.append(argument)
    return expanded


def add_parser(commands) -> None:
    about = DESCRIPTION.format(options=fairseq_options())
    parser = add_evaluation(commands, "evaluate", "[@FILE] [fairseq-generate options]", about, EXAMPLE)
    parser.add_argument("--metric", choices=("bleu", "rouge"), default="bleu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print and write one JSON object, in one line")
    add_bleu_options(parser)
    add_rouge_options(parser)
    test = parser.add_argument_group("significance of a difference in BLEU and chrF")
    test.add_argument("--against", type=Path, metavar="FILE", help="the log of another system, as in lightconv score")
    test.add_argument("--samples", type=positive, metavar="N", help="samples of the test")
    parser.set_defaults(unknown=[], before=with_files)
