"""`lightconv perplexity`: the perplexity of a language model on a text, by fairseq-eval-lm.

Options that its parser does not know are passed to fairseq-eval-lm.
"""

import argparse
import json

from lightconv_plugin.arguments import natural, places_first
from lightconv_plugin.cli.score_options import add_evaluation
from lightconv_plugin.errors import InputError

DESCRIPTION = """\
Runs fairseq-eval-lm with the sample length and the break mode of the training, and prints one line. All other options
are passed to fairseq-eval-lm.

The perplexity is per dictionary token, hence per word for a dictionary of words; </s> counts as a token. With
--post-process '@@ ', which joins BPE, it is per word. It is an error if a token is not scored. The log and the result
(JSON) are written next to the checkpoint, as CHECKPOINT.SUBSET.eval_lm and CHECKPOINT.SUBSET.ppl (without .pt), and
replace those of an earlier run."""
EXAMPLE = """\
example:
  lightconv perplexity data/wikitext2/data-bin runs/wikitext2/dynamicconv/checkpoint_best.pt --context-window 128"""


def run(args: argparse.Namespace) -> int:
    if not args.data.is_dir():
        raise InputError(f"no folder {args.data} with binarised data")
    from lightconv_plugin.recipes.environment import compute_here
    from lightconv_plugin.recipes.evaluation import measure_perplexity

    compute_here()
    result = measure_perplexity(args.data, args.checkpoint, args.subset, args.context_window, args.unknown)
    line = (
        "{subset}: perplexity {perplexity:.2f}{unit} over {tokens:,} tokens, each with at least {context_window} "
        "before it where the text has them{room}; {parameters:,} parameters"
    )
    unit = " per word" if result["unit"] == "word" else ""
    whole_sentences = args.context_window and result["sample_break_mode"] != "none"
    room = " and its sample has room for them" if whole_sentences else ""
    print(json.dumps(result) if args.json else line.format(**result | {"unit": unit, "room": room}))
    return 0


def add_parser(commands) -> None:
    parser = add_evaluation(commands, "perplexity", "[fairseq-eval-lm options]", DESCRIPTION, EXAMPLE)
    parser.add_argument(
        "--context-window", type=natural, default=0, metavar="N",
        help="score each token after at least N others (default: 0, where each sample's first tokens have few)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.set_defaults(unknown=[], before=places_first)
