"""`lightconv translate`: raw text in, translations out, line by line.

Exit status: 0 every line was translated; 1 some lines could not be (listed on standard error, their output is empty);
2 bad arguments or input, the output is missing or incomplete; 130 interrupted.
"""

import argparse
import contextlib
import inspect
import logging
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lightconv_plugin.arguments import add_force, add_text_options, positive
from lightconv_plugin.cli import old_words
from lightconv_plugin.cli.search_options import add_search_options, add_speed_options
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write, check_new_file, same_file
from lightconv_plugin.quiet import quietly
from lightconv_plugin.text.shortlist import NO_SHORTLIST

if TYPE_CHECKING:
    from lightconv_plugin.generation.translations import Translation
    from lightconv_plugin.generation.translator import Translator

_BUFFER = 2000  # lines read before translating: enough for batches of similar lengths
_CHUNK = 2**16  # bytes of a line read at once with --split
_EPILOG = """\
Lines are UTF-8 and end at a line feed; a carriage return before it is removed. An empty line gives an empty line. So
does a line that cannot be translated (not UTF-8, a NUL, longer than the model allows): standard error gives its number
and the reason, the other lines are translated, and the exit status is 1. A model that was trained on truncated
sentences (--truncate-source) reads the beginning of a line that is too long; standard error says how many were cut.

output: one translation per input line, in the same order. --with-scores puts the score and a tab before it: the base-2
log-probability divided by (number of pieces)^lenpen, as on fairseq's H- lines. --nbest N writes N lines per input line,
best first, each starting with the number of the input line (from 1) and a tab. An empty line has an empty score and
gives one line for any N.

--score REF translates nothing: it writes the score of each line of REF as the translation of the input line with the
same number (with --with-scores: score, tab, that line). Options that only a search has, such as --beam, are errors.

--split sentences is for running text: each line, however long, is split into sentences by the package
sentencex, and their translations are joined into one line. A sentence longer than the model allows is cut as well.
Memory does not grow with the text.

--dtype auto is int8 for a model exported with 8-bit weights, otherwise the fastest type on this CPU for a model of this
size (docs/decoding.md has the table); on a GPU, the first of bfloat16, float16 and float32 that it has units for. On a
terminal or with --verbose, standard error shows the choice.

--shortlist FILE restricts each batch to likely words, and their probabilities are normalised over these. A translation
then depends on the other sentences of its batch, which allow more words: smaller batches (--batch-size) are faster, and
lists fit a sentence more closely. It changes translations: compare BLEU on validation data with and without it. An
exported directory may have its own shortlist, which is used unless FILE, or --shortlist none, is given.

With --device cuda, the steps of the search are captured in CUDA graphs from the second batch of a size on.
--no-cuda-graphs turns this off, --cuda-graphs captures every batch.

An exported directory is complete and does not need fairseq. For a checkpoint, the dictionaries come from the training's
data-bin or from the checkpoint's folder; merges, tokeniser and case come from the folder around data-bin
(lightconv prepare).

example:
  lightconv translate exported/iwslt14_de_en < in.txt > out.txt
  lightconv translate runs/iwslt14_de_en/dynamicconv/average10.pt < in.txt > out.txt
  lightconv translate dynamicconv.glu.wmt16.en-de < in.txt > out.txt
"""


def run(args: argparse.Namespace) -> int:
    nbest = args.nbest or 1
    _renamed(args)
    if not args.path:
        raise InputError("give a model: an exported directory, a checkpoint, or a name of lightconv released")
    if args.beam is not None and nbest > args.beam:
        raise InputError(f"--nbest {nbest} is more than --beam {args.beam}")
    if args.split and (args.nbest is not None or args.with_scores or args.score):
        raise InputError(
            "--split writes whole lines of several sentences: --nbest, --with-scores and --score are not valid"
        )
    if args.score and args.nbest is not None:
        raise InputError("--score scores one translation of each line: --nbest is not valid")
    if args.score and args.dtype not in ("auto", "float32"):
        raise InputError(f"--score computes in float32: --dtype {args.dtype} is not valid")
    listed = None if args.shortlist == NO_SHORTLIST else args.shortlist
    if args.score and listed:
        raise InputError("--score takes the whole vocabulary into account: --shortlist is not valid")
    if args.score:
        _check_no_search(args)
    if args.cuda_graphs and not args.device.startswith("cuda"):
        raise InputError(f"--cuda-graphs needs a GPU, such as --device cuda: got --device {args.device}")
    for option, file in (("--input", args.input), ("--score", args.score), ("--shortlist", listed)):
        if file and not file.exists():  # it may be a pipe
            raise InputError(f"{option}: no such file: {file}")
        if file and file.is_dir():
            raise InputError(f"{option}: {file} is a folder")
        if file and args.output and same_file(args.output, file):
            raise InputError(f"--output {args.output} is the {option}")
    if args.output:
        check_new_file(args.output, args.force)
    if args.input is None and sys.stdin is None:
        raise InputError("standard input is closed: give --input FILE")
    if args.output is None and sys.stdout is None:
        raise InputError("standard output is closed: give --output FILE")
    interactive = args.input is None and sys.stdin.isatty()
    buffer = args.buffer or (1 if interactive else _BUFFER)
    with contextlib.ExitStack() as stack:
        # Before the models are loaded, so that an output that cannot be written is reported at once.
        out = stack.enter_context(atomic_write(args.output)) if args.output else _standard_output()
        read = stack.enter_context(args.input.open("rb")) if args.input else sys.stdin.buffer
        translator = stack.enter_context(_load(args))
        for note in translator.notes:
            _say(args, "note: " + note.replace("`tokenizer`", "--tokenizer").replace("`dtype`", "--dtype"))
        talks = args.verbose or sys.stderr.isatty()
        if talks and not args.score:
            _say(args, f"{translator.dtype}: {translator.dtype_reason}")
            if translator.shortlist:
                _say(args, f"shortlist: {translator.shortlist}")
        if interactive:
            _say(args, f"type {translator.source_lang} sentences, one per line; Ctrl-D ends")
        unit = " sentences" if args.split else " lines"
        bar = stack.enter_context(_progress(shown=sys.stderr.isatty() and buffer > 1, unit=unit))
        work = _Work(args, translator, out, buffer, bar)
        begin = time.perf_counter()
        if args.split:
            work.document(read)
        elif args.score:
            work.references(read, stack.enter_context(args.score.open("rb")))
        else:
            work.lines(read, nbest)
        if talks:
            bar.close()
            _say(args, work.speed(time.perf_counter() - begin))
    return 1 if work.bad else 0


def _check_no_search(args: argparse.Namespace) -> None:
    """Refuse the options that only a search has, at values that are not the default."""
    searching = {
        "--beam": args.beam,
        "--min-len": args.min_len,
        "--max-len-a": args.max_len_a or None,
        "--max-len-b": args.max_len_b,
        "--no-repeat-ngram-size": args.no_repeat_ngram_size,
        "--cuda-graphs": args.cuda_graphs or None,
    }
    given = [option for option, value in searching.items() if value is not None]
    if given:
        raise InputError(f"--score searches for no translation: {given[0]} is not valid")


def _renamed(args: argparse.Namespace) -> None:
    """Take the old words for the model and the scores."""
    if args.old_path:
        old_words.warn(args.command, "--path CHECKPOINT", "CHECKPOINT alone")
        args.path = [*args.path, *args.old_path]
    if args.scores:
        old_words.warn(args.command, "--scores", "--with-scores")
        args.with_scores = True


class _Work:
    """Translates or scores one buffer at a time, and counts.

    done: number of lines (with --split: sentences) so far; bad: those that could not be translated; cut: those that
    were cut. pieces: total number of pieces in the translations.
    """

    def __init__(self, args: argparse.Namespace, translator: "Translator", out: IO[str], buffer: int, bar) -> None:
        self._args, self._translator, self._out, self._buffer, self._bar = args, translator, out, buffer, bar
        self.done = self.bad = self.cut = self.pieces = 0

    def lines(self, read: IO[bytes], nbest: int) -> None:
        """Translate each line by itself."""
        for lines in _buffers(read, self._buffer):
            self._write(self._translator.translate(lines, nbest, self._bar.update))
        self._sum_up()

    def references(self, read: IO[bytes], references: IO[bytes]) -> None:
        """Score the references, line by line."""
        others = _buffers(references, self._buffer)
        for lines in _buffers(read, self._buffer):
            given = next(others, [])
            if len(given) < len(lines):
                raise InputError(f"--score {self._args.score} has {self.done + len(given)} lines, the input has more")
            if len(given) > len(lines):
                self._too_many(self.done + len(lines))
            self._write(self._translator.score(lines, given, self._bar.update))
        if next(others, []):
            self._too_many(self.done)
        self._sum_up()

    def _too_many(self, lines: int) -> None:
        raise InputError(f"--score {self._args.score} has more lines than the input, which has {lines}")

    def document(self, read: IO[bytes]) -> None:
        """Translate running text: split lines of any length into sentences."""
        chunks = iter(lambda: read.readline(_CHUNK), b"")
        for one in self._translator.translate_document(chunks, window=self._buffer):
            self.done += 1
            self._count(one.translation, one.part.line, ", a sentence left out")
            self.cut += one.part.cut
            self._out.write(one.written)
            self._bar.update(1)
            if self.done % self._buffer == 0:
                self._out.flush()  # before more is read
        self._out.flush()
        self._sum_up("sentences")

    def speed(self, seconds: float) -> str:
        """The amount of text and the speed."""
        what = "sentences" if self._args.split else "lines"
        each = f"{self.done / seconds:,.1f} {what}/s, {self.pieces / seconds:,.0f} tokens/s"
        return f"{self.done:,} {what}, {self.pieces:,} tokens in {seconds:,.1f} s: {each}"

    def _write(self, translations: "list[Translation]") -> None:
        args = self._args
        for number, translation in enumerate(translations, self.done + 1):
            self._count(translation, number, " left empty")
            if args.score:
                self._out.write(format_score(translation, args.with_scores) + "\n")
            else:
                self._out.writelines(
                    f"{line}\n" for line in format_lines(translation, number, args.nbest, args.with_scores)
                )
        self.done += len(translations)
        self._out.flush()  # a reader gets these translations before the next buffer is read

    def _count(self, translation: "Translation", line: int, what: str) -> None:
        self.pieces += len(translation.tokens)
        self.cut += translation.cut
        if translation.problem is not None:
            self.bad += 1
            with self._bar.external_write_mode(file=sys.stderr):
                _say(self._args, f"line {line}{what}: {translation.problem}")

    def _sum_up(self, what: str = "lines") -> None:
        if self.cut:
            _say(self._args, f"{self.cut} {what} were longer than the model allows and were cut")
        if self.bad:
            done = "scored" if self._args.score else "translated"
            _say(self._args, f"{self.bad} of {self.done} {what} could not be {done}")


def format_lines(translation: "Translation", number: int, nbest: int | None, scores: bool) -> list[str]:
    """The output lines for one input line, with the options --nbest (None: not given) and --with-scores."""
    rows = [(f"{hypothesis.score:.4f}", hypothesis.text) for hypothesis in translation.hypotheses] or [("", "")]
    before = [] if nbest is None else [str(number)]
    return ["\t".join([*before, *([score] if scores else []), text]) for score, text in rows]


def format_score(translation: "Translation", text: bool) -> str:
    """The output line for one input line with --score; text: with --with-scores."""
    score = "" if translation.score is None else f"{translation.score:.4f}"
    return f"{score}\t{translation.text}" if text else score


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
    """The Translator for these options. Warnings and the generator's messages go to standard error."""
    with quietly():
        from lightconv_plugin.generation.translator import Translator
    logging.basicConfig(format=f"lightconv {args.command}: %(message)s", stream=sys.stderr)
    logging.getLogger("lightconv_plugin.generation").setLevel(logging.INFO)
    parameters = inspect.signature(Translator).parameters.values()
    options = {option.name: getattr(args, option.name) for option in parameters if option.kind is option.KEYWORD_ONLY}
    if args.score:
        options |= {"dtype": "float32", "shortlist": NO_SHORTLIST}
    translator = Translator(args.path, args.data, **options)
    logging.getLogger().setLevel(logging.WARNING)  # fairseq has set it to DEBUG
    return translator


def _progress(shown: bool, unit: str):
    from tqdm import tqdm

    return tqdm(unit=unit, disable=not shown, file=sys.stderr, leave=False)


def _say(args: argparse.Namespace, message: str) -> None:
    print(f"lightconv {args.command}: {message}", file=sys.stderr, flush=True)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "translate",
        description="Translates text, one sentence per line, from standard input to standard output.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "path", type=Path, nargs="*", metavar="MODEL",
        help="a directory written by lightconv export, a fairseq checkpoint, or a name of lightconv released; "
        "several of one kind: an ensemble",
    )  # fmt: skip
    parser.add_argument("--path", dest="old_path", type=Path, action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="folder of a checkpoint's dictionaries")
    files = parser.add_argument_group("input and output")
    files.add_argument("--input", type=Path, metavar="FILE", help="read this instead of standard input")
    files.add_argument("--output", type=Path, metavar="FILE", help="write this instead of standard output, atomically")
    add_force(files, "the file of --output, if it exists")
    files.add_argument(
        "--buffer", type=positive, metavar="LINES",
        help=f"lines to read before translating and writing them (default: {_BUFFER}; 1 at a terminal)",
    )  # fmt: skip
    files.add_argument("--nbest", type=positive, metavar="N", help="write the N best translations of each line")
    files.add_argument("--with-scores", action="store_true", help="write the score before each translation")
    files.add_argument("--scores", action="store_true", help=argparse.SUPPRESS)
    files.add_argument(
        "--score", type=Path, metavar="REF", help="score the lines of this file as translations; translate nothing"
    )
    files.add_argument("--split", choices=("sentences",), help="running text: translate each line sentence by sentence")
    files.add_argument("--verbose", action="store_true", help="print the type and the speed, as on a terminal")
    files.add_argument("--unk", default="<unk>", metavar="TEXT", help="written for an unknown word ('': nothing)")
    add_text_options(parser)
    add_search_options(parser)
    add_speed_options(parser)
