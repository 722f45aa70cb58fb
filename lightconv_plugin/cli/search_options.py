"""The options of a beam search: those of `lightconv translate`, and what the help of other commands says about them."""

import argparse
import textwrap
from pathlib import Path

from lightconv_plugin.arguments import positive

_BEAM = "hypotheses kept for each sentence (default: 5). 1 is greedy: the fastest; above 10, slower and rarely better"
_LENPEN = (
    "length penalty (default: 1): above 1 for longer translations, below 1 for shorter ones. lightconv tune chooses it"
)
_MAX_LEN = (
    "the longest translation, in subwords: A × the longest source sentence of its batch + B (defaults: 0 and 200). "
    "Raise B if translations break off, or set A 1.5 and B 10 if they repeat themselves up to the end"
)
_TEMPERATURE = (
    "divide the logits by X before the softmax (default: 1): above 1, the probabilities of words differ less. Leave it "
    "at 1, unless scores are to be calibrated"
)
_BATCH = "most source subwords of a batch, padding included (default: {}): fewer need less memory, more suit a GPU"


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """The options of the search and of its batches, for a command that translates itself."""
    search = parser.add_argument_group("search (an exported model may have other defaults)")
    search.add_argument("--beam", type=positive, metavar="N", help=_BEAM)
    search.add_argument("--lenpen", type=float, metavar="X", help=_LENPEN)
    search.add_argument(
        "--unkpen", type=float, default=0.0, metavar="X",
        help="subtracted from the score of an unknown word (default: 0): above 0 for fewer of them",
    )  # fmt: skip
    search.add_argument("--min-len", type=int, metavar="N", help="the shortest translation, in subwords (default: 1)")
    search.add_argument("--max-len-a", type=float, default=0.0, metavar="A", help=_MAX_LEN)
    search.add_argument("--max-len-b", type=int, metavar="B", help="see --max-len-a")
    search.add_argument(
        "--no-repeat-ngram-size", type=int, metavar="N",
        help="no sequence of N subwords occurs twice (default: 0, off): 3 for summaries",
    )  # fmt: skip
    search.add_argument("--temperature", type=float, default=1.0, metavar="X", help=_TEMPERATURE)
    search.add_argument(
        "--shortlist", type=Path, metavar="FILE",
        help="choose only among the target words that FILE, from lightconv shortlist, lists for the source words of a "
        "batch: faster, above all for small batches, but some translations change. none: among all words (default: the "
        "shortlist of the exported model, or none)",
    )  # fmt: skip


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    """Where and how the search of a command that translates itself is computed, and the sizes of its batches."""
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        default="auto",
        help="type of the weights (default: %(default)s, the fastest for the model; docs/decoding.md has the table)",
    )
    speed.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1 … (default: %(default)s)")
    speed.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction,
        help="with --device cuda: capture the steps of the search in CUDA graphs for every batch, or never (default: "
        "from the second batch of a size)",
    )  # fmt: skip
    speed.add_argument("--threads", type=positive, metavar="N", help="cores to use (default: all)")
    tokens = 4096
    speed.add_argument("--batch-tokens", type=positive, default=tokens, metavar="N", help=_BATCH.format(tokens))
    speed.add_argument("--batch-size", type=positive, metavar="N", help="most sentences of a batch (default: any)")


def fairseq_options() -> str:
    """Help about the same options of fairseq-generate, for the description of a command that passes them on."""
    options = {
        "--beam N": _BEAM,
        "--lenpen X": _LENPEN,
        "--max-len-a A, --max-len-b B": _MAX_LEN,
        "--temperature X": _TEMPERATURE,
        "--max-tokens N": _BATCH.format(8000),
    }
    indent = " " * 6
    return "\n".join(
        f"  {name}\n" + textwrap.fill(text, 118, initial_indent=indent, subsequent_indent=indent)
        for name, text in options.items()
    )
