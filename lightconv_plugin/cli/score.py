"""`lightconv score`: BLEU and chrF of translations, ROUGE of summaries, perplexities measured by fairseq-eval-lm.

bleu.py, rouge.py and significance.py define the measures.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from lightconv_plugin.arguments import add_force, positive
from lightconv_plugin.checkpoints.loading import count_parameters
from lightconv_plugin.cli.score_options import (
    BLEU_OPTIONS,
    ROUGE_OPTIONS,
    add_bleu_options,
    add_rouge_options,
    bpe_mark,
    measuring,
    refuse,
    warner,
)
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_new_file, read_lines, same_file, write_text
from lightconv_plugin.scoring.generate_log import parse_gen_log
from lightconv_plugin.scoring.measuring import Scored, score, with_facts
from lightconv_plugin.scoring.perplexity import parse_eval_lm_log
from lightconv_plugin.scoring.significance import SAMPLES

FILES = ("gen", "sys", "ref", "raw_ref", "against", "log", "checkpoint")
TEXT_OPTIONS = ("gen", "sys", "ref", "remove_bpe", "speed")
# The options of each metric.
OPTIONS = {
    "bleu": (*TEXT_OPTIONS, *BLEU_OPTIONS, "data", "subset", "against", "samples"),
    "rouge": (*TEXT_OPTIONS, *ROUGE_OPTIONS),
    "perplexity": ("log",),
}


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    if args.output:
        for name in FILES:
            if (file := getattr(args, name)) and same_file(args.output, file):
                raise InputError(f"--output {args.output} is the file of --{name.replace('_', '-')}")
        check_new_file(args.output, args.force)
    facts: dict[str, float | str | None] = {"parameters": count_parameters(args.checkpoint)} if args.checkpoint else {}
    if args.metric == "perplexity":
        result = parse_eval_lm_log(read_lines(args.log), args.log)
        scored = Scored(asdict(result), result.lines())
    else:
        scored, search = _score_text(args)
        facts |= search if args.speed else {}
    text = with_facts(scored, facts).text(args.json)
    print(text, end="")
    if args.output:
        write_text(args.output, text)
    return 0


def _score_text(args: argparse.Namespace) -> tuple[Scored, dict[str, float | str | None]]:
    """(the scores, what the log says of the search)."""
    how, warn = measuring(args, args.metric), warner("score")
    if args.data:
        how = how.with_data(args.data, args.subset or "test")
    search: dict[str, float | str | None] = {}
    if args.gen:
        log = parse_gen_log(read_lines(args.gen), args.gen)
        hypotheses, references = log.hypotheses, log.references
        search = log.facts()
        how.check_decoded(log.decoded, args.gen)
        if args.speed and "sentences_per_second" not in search:
            raise InputError(
                f"--speed: {args.gen} has no line 'Translated … sentences (…) in …s (… sentences/s, …': "
                "fairseq-generate may write it to standard error; append that to the log (2> messages)"
            )
    else:
        hypotheses, references = read_lines(args.sys), read_lines(args.ref)
    return score(how, hypotheses, references, warn=warn, against=args.against, samples=args.samples), search


def _check_options(args: argparse.Namespace) -> None:
    known = OPTIONS[args.metric]
    others = {name for names in OPTIONS.values() for name in names} - set(known)
    refuse(args, sorted(others), f"--metric {args.metric}")
    if args.metric == "perplexity":
        if not args.log:
            raise InputError("--metric perplexity needs --log FILE, the output of fairseq-eval-lm")
        return
    if args.gen and (args.sys or args.ref):
        raise InputError("--gen has both sides: give either --gen or --sys with --ref")
    if not args.gen and not (args.sys and args.ref):
        raise InputError("give either --gen FILE or both --sys FILE and --ref FILE")
    if args.speed and not args.gen:
        raise InputError("--speed is read from the log of fairseq-generate: give it by --gen FILE")
    if args.subset and not args.data:
        raise InputError("--subset belongs to --data DATA_BIN: give both or neither")
    if args.samples and not args.against:
        raise InputError("--samples belongs to the test of --against FILE: give both or neither")


DESCRIPTION = """\
--metric bleu: tokenised BLEU (multi-bleu.perl's and fairseq-score's); sacreBLEU and chrF on detokenised text.

--metric rouge: ROUGE-1, -2, -L and -Lsum by the library rouge-score: F1 with its 95% bootstrap interval, precision
and recall. ROUGE-L treats each text as one sentence; ROUGE-Lsum, which papers on CNN/Daily Mail call ROUGE-L, goes
sentence by sentence. Words are those of rouge-score: runs of a-z and 0-9, without case; any other character separates
words. The usual protocol applies PTBTokenizer (Stanford CoreNLP) to both sides. It turns "don't" into "do n't", which
gives the words "do", "n", "t" instead of "don", "t", and a bracket into -lrb-, which gives the word "lrb". To compare
with published scores, pass PTB tokens.

--metric perplexity: of a language model, from a log of fairseq-eval-lm. `lightconv perplexity` runs fairseq-eval-lm.

A log that is truncated, or not from one complete run, is an error."""
EXAMPLE = """\
example:
  lightconv score --gen gen.out --lang de --remove-bpe
  lightconv score --gen dynamicconv/gen.out --data data/iwslt14_de_en/data-bin --against transformer/gen.out --json
  lightconv score --metric rouge --gen gen.out --remove-bpe
  lightconv score --metric perplexity --log eval_lm.log"""


def add_parser(commands) -> None:
    parser = commands.add_parser("score", description=DESCRIPTION, epilog=EXAMPLE)
    parser.add_argument("--metric", choices=tuple(OPTIONS), default="bleu", help="default: %(default)s")
    parser.add_argument(
        "--gen", type=Path, metavar="FILE", help="the complete output of fairseq-generate, with references"
    )
    parser.add_argument(
        "--sys", type=Path, metavar="FILE", help="translations or summaries, one on each line (with --ref)"
    )
    parser.add_argument("--ref", type=Path, metavar="FILE", help="references, one on each line (with --sys)")
    parser.add_argument(
        "--remove-bpe", nargs="?", const="@@", type=bpe_mark, metavar="MARK",
        help="join subwords first: '@@ ' (if no value is given) or sentencepiece",
    )  # fmt: skip
    parser.add_argument("--speed", action="store_true", help="also print the sentences/s stated in the log of --gen")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="also print this model's number of parameters")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed to this file")
    add_force(parser, "that file, if it exists")
    add_bleu_options(parser)
    corpus = parser.add_argument_group("BLEU of a corpus made by lightconv prepare")
    corpus.add_argument(
        "--data", type=Path, metavar="DATA_BIN",
        help="take language, raw references and case from this folder and the one above, unless given",
    )  # fmt: skip
    corpus.add_argument("--subset", metavar="NAME", help="the subset of --data (default: test)")
    test = parser.add_argument_group("significance of a difference in BLEU and chrF")
    test.add_argument(
        "--against", type=Path, metavar="FILE",
        help="the other system: a log of fairseq-generate, or translations, one per line. Paired bootstrap test: "
        "p-values, and mean and 95%% interval of both",
    )  # fmt: skip
    test.add_argument("--samples", type=positive, metavar="N", help=f"samples of the test (default: {SAMPLES})")
    add_rouge_options(parser)
    models = parser.add_argument_group("of --metric perplexity")
    models.add_argument("--log", type=Path, metavar="FILE", help="the output of fairseq-eval-lm")
