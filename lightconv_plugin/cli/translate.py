"""`lightconv translate`: raw text in, translations out, line by line.

Exit status: 0 every line was translated; 1 some could not be (standard error names them, their output is empty); 2 bad
arguments or input, the output is missing or incomplete; 130 interrupted.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lightconv_plugin.arguments import positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write

if TYPE_CHECKING:
    from lightconv_plugin.generation.translator import Translation

_BUFFER = 2000  # lines read before any is translated: enough for batches of similar lengths
_EPILOG = """\
Lines are UTF-8 and end at a line feed; a carriage return before it is removed. An empty line gives an empty line. So
does a line that cannot be translated (not UTF-8, a NUL, longer than the model allows): standard error gives its number
and the reason, the other lines are translated, and the exit status is 1.

output: one translation per input line, in the same order. --scores puts the score and a tab before it: the base-2
log-probability over (number of pieces)^lenpen, as on fairseq's H- lines. --nbest N writes N lines per input line, best
first, each starting with the number of the input line (from 1) and a tab. An empty line has an empty score and gives
one line for any N.

Defaults: the dictionaries are those of the training's data-bin, or beside the checkpoint; merges, tokeniser and case
those of the folder around data-bin (lightconv prepare).

example:
  lightconv translate --path runs/iwslt14_de_en/dynamicconv/average10.pt < in.txt > out.txt
"""


def run(args: argparse.Namespace) -> int:
    nbest = args.nbest or 1
    if nbest > args.beam:
        raise InputError(f"--nbest {nbest} is more than --beam {args.beam}")
    if args.input is not None and not args.input.is_file():
        raise InputError(f"--input: no such file: {args.input}")
    if args.input and args.output and args.output.exists() and args.output.samefile(args.input):
        raise InputError(f"--output {args.output} is the --input")
    interactive = args.input is None and sys.stdin.isatty()
    buffer = args.buffer or (1 if interactive else _BUFFER)
    with contextlib.ExitStack() as stack:
        # Before the models are loaded, so that an output that cannot be written is reported at once.
        out = stack.enter_context(atomic_write(args.output)) if args.output else _standard_output()
        read = stack.enter_context(args.input.open("rb")) if args.input else sys.stdin.buffer
        translator = stack.enter_context(_load(args))
        for note in translator.notes:
            _say(args, "note: " + note.replace("`tokenizer`", "--tokenizer"))
        if interactive:
            _say(args, f"type {translator.source_lang} sentences, one per line; Ctrl-D ends")
        bar = stack.enter_context(_progress(shown=sys.stderr.isatty() and buffer > 1))
        try:
            bad = _translate_all(args, translator, read, out, buffer, nbest, bar)
        except BrokenPipeError:
            if args.output:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing is flushed into it at exit
            return 141  # like a program ended by the signal
    return 1 if bad else 0


def _translate_all(
    args: argparse.Namespace, translator, read: IO[bytes], out: IO[str], buffer: int, nbest: int, bar
) -> int:
    """Translate everything, a buffer at a time; returns the number of lines that could not be translated."""
    done = bad = 0
    for lines in _buffers(read, buffer):
        for number, translation in enumerate(translator.translate(lines, nbest, bar.update), done + 1):
            if translation.problem is not None:
                bad += 1
                with bar.external_write_mode(file=sys.stderr):
                    _say(args, f"line {number} left empty: {translation.problem}")
            out.writelines(f"{line}\n" for line in format_lines(translation, number, args.nbest, args.scores))
        done += len(lines)
        out.flush()  # a reader gets this buffer's translations before the next buffer is read
    if bad:
        _say(args, f"{bad} of {done} lines could not be translated")
    return bad


def format_lines(translation: "Translation", number: int, nbest: int | None, scores: bool) -> list[str]:
    """The output lines for one input line, with the options --nbest (None: not given) and --scores."""
    rows = [(f"{hypothesis.score:.4f}", hypothesis.text) for hypothesis in translation.hypotheses] or [("", "")]
    before = [] if nbest is None else [str(number)]
    return ["\t".join([*before, *([score] if scores else []), text]) for score, text in rows]


def _buffers(read: IO[bytes], size: int) -> Iterator[list[bytes]]:
    """`size` lines at a time, without a byte order mark before the first."""
    lines = iter(read)
    first = [line.removeprefix(b"\xef\xbb\xbf") for line in islice(lines, 1)]
    lines = chain(first, lines)
    while some := list(islice(lines, size)):
        yield some


def _standard_output() -> IO[str]:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout


def _load(args: argparse.Namespace):
    """The Translator of the options. Warnings and the generator's own messages go to standard error."""
    import logging

    logging.disable(logging.INFO)  # fairseq's messages while it is imported
    try:
        from lightconv_plugin.generation.translator import Translator
    finally:
        logging.disable(logging.NOTSET)
    logging.basicConfig(format=f"lightconv {args.command}: %(message)s", stream=sys.stderr)
    logging.getLogger("lightconv_plugin.generation").setLevel(logging.INFO)
    made = Translator(args.path, args.data, **{name: getattr(args, name) for name in _FORWARDED})
    logging.getLogger().setLevel(logging.WARNING)  # fairseq has set it to DEBUG
    return made


def _progress(shown: bool):
    from tqdm import tqdm

    return tqdm(unit=" lines", disable=not shown, file=sys.stderr, leave=False)


def _say(args: argparse.Namespace, message: str) -> None:
    print(f"lightconv {args.command}: {message}", file=sys.stderr, flush=True)


_FORWARDED = (
    "source_lang", "target_lang", "bpe_codes", "sentencepiece", "tokenizer", "lowercase", "beam", "lenpen", "unkpen",
    "min_len", "max_len_a", "max_len_b", "temperature", "no_repeat_ngram_size", "batch_tokens", "batch_size", "threads",
    "dtype", "device", "unk",
)  # fmt: skip


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "translate",
        description="Translates text, one sentence a line, from standard input to standard output.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--path", type=Path, action="append", required=True, metavar="CHECKPOINT",
        help="the model; repeat it for an ensemble",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="folder of the dictionaries")
    files = parser.add_argument_group("input and output")
    files.add_argument("--input", type=Path, metavar="FILE", help="instead of standard input")
    files.add_argument("--output", type=Path, metavar="FILE", help="instead of standard output; whole or not at all")
    files.add_argument(
        "--buffer", type=positive, metavar="LINES",
        help=f"lines to read before translating and writing them (default: {_BUFFER}; 1 at a terminal)",
    )  # fmt: skip
    files.add_argument("--nbest", type=positive, metavar="N", help="the N best translations of each line")
    files.add_argument("--scores", action="store_true", help="write the score before each translation")
    files.add_argument("--unk", default="<unk>", metavar="TEXT", help="written for an unknown word ('': nothing)")
    text = parser.add_argument_group("how the training text was prepared (default: as corpus.json beside it says)")
    text.add_argument("-s", "--source-lang", metavar="XX")
    text.add_argument("-t", "--target-lang", metavar="XX")
    text.add_argument("--bpe-codes", metavar="FILE", help="merges of subword-nmt; none: the text is already split")
    text.add_argument("--sentencepiece", type=Path, metavar="MODEL", help="sentencepiece model")
    text.add_argument("--tokenizer", choices=("moses", "none"), help="also how translations are detokenised")
    text.add_argument("--lowercase", action="store_true", help="lower-case the text first")
    search = parser.add_argument_group("search (defaults of fairseq-generate)")
    search.add_argument("--beam", type=positive, default=5, metavar="N", help="(default: %(default)s)")
    search.add_argument("--lenpen", type=float, default=1.0, metavar="X", help="length penalty: above 1, longer ones")
    search.add_argument("--unkpen", type=float, default=0.0, metavar="X", help="unknown words: above 0, fewer")
    search.add_argument("--min-len", type=int, default=1, metavar="N", help="minimum number of pieces")
    search.add_argument("--max-len-a", type=float, default=0.0, metavar="A", help="at most A·T + B pieces, where T is")
    search.add_argument("--max-len-b", type=int, default=200, metavar="B", help="the longest source of the batch")
    search.add_argument("--no-repeat-ngram-size", type=int, default=0, metavar="N", help="no N-gram occurs twice")
    search.add_argument("--temperature", type=float, default=1.0, metavar="X")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32", help="of the weights")
    speed.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1 … (default: %(default)s)")
    speed.add_argument("--threads", type=positive, metavar="N", help="cores to use (default: all)")
    speed.add_argument("--batch-tokens", type=positive, default=4096, metavar="N", help="(default: %(default)s)")
    speed.add_argument("--batch-size", type=positive, metavar="N", help="maximum number of sentences per batch")
    parser.set_defaults(run=run)
