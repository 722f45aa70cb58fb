"""Entry point of the `lightconv` command: runs one subcommand and turns its errors into one line and an exit status.

A subcommand NAME is the module lightconv_plugin.cli.NAME (with "_" for "-") and one line in COMMANDS. The module is
imported only when the subcommand is used, and defines

    run(args) -> int        the command; returns the exit status, raises InputError for bad input
    add_parser(commands)    commands.add_parser(NAME, description=…, …) with its arguments

A subcommand that passes arguments on to another program can use set_defaults(rest=[]): `args.rest` then holds
everything after "--". With set_defaults(unknown=[]), `args.unknown` holds the arguments that its parser does not know
(such a parser needs allow_abbrev=False). A function set as `before` maps the arguments to those to be parsed.

The modules outside cli/ know no options: their errors put parameter names in backquotes, as in "`lang` is needed". Here
`lang` becomes --lang, or DATA_BIN for a positional argument with that metavar.

Exit status: 0 done; 1 `doctor` found a problem, `build` failed, or `translate` left a line empty; 2 bad arguments or
input; 130 interrupted; 141 whoever read what it prints has gone.
"""

import argparse
import difflib
import gc
import importlib
import io
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import lightconv_plugin
from lightconv_plugin.errors import InputError, how_to_get

# The subcommands by purpose, each with its line in --help.
COMMANDS = {
    "data": {
        "prepare": "download, tokenise and binarise a corpus",
        "distill": "translate a training text by a teacher, for a student",
    },
    "train": {
        "train": "train a configuration, or resume its training",
    },
    "evaluate": {
        "tune": "choose checkpoints and length penalty on validation data",
        "average": "average the parameters of several checkpoints",
        "evaluate": "translate a test set and score it",
        "perplexity": "measure a language model's perplexity",
        "score": "score files: BLEU, chrF, ROUGE, perplexity, significance",
        "report": "write an HTML page: curves, scores, kernels, translations",
        "reproduce": "prepare, train, tune and score a published system",
        "demo": "train and compare two small models in minutes",
    },
    "use": {
        "translate": "translate raw text",
        "shortlist": "learn which target words are likely, to translate faster",
        "released": "get the models that the papers' authors released",
        "export": "write a model as a directory that needs no fairseq",
        "deploy": "compile an exported model for programs without Python",
        "convert": "convert checkpoints to and from the layouts of other code",
    },
    "maintain": {
        "doctor": "check the installation and its results",
        "build": "compile the kernels now instead of at first use",
        "user-dir": "print the path for fairseq's --user-dir",
    },
}
# New objects after which Python looks for garbage in cycles. With its default of 700, this takes a fifth of the time in
# which torch and fairseq are imported.
_NEW_OBJECTS = 50_000
# The modules that each extra installs.
EXTRAS = {
    "fairseq": ("fairseq", "fairseq_cli", "hydra", "omegaconf"),
    "text": ("regex", "sacremoses", "safetensors", "sentencepiece", "subword_nmt"),
    "chinese": ("jieba",),
    "japanese": ("sudachidict_core", "sudachipy"),
    "sentences": ("sentencex",),
    "recipes": ("rouge_score", "sacrebleu", "tabulate", "tomli", "tqdm", "yaml"),
    "report": ("jinja2", "matplotlib"),
}


def overview() -> str:
    """The subcommands by group, each with its one-line description."""
    lines = []
    for group, commands in COMMANDS.items():
        labels = [group, *[""] * len(commands)]
        lines += [f"{label:<10}{name:<12}{text}" for label, (name, text) in zip(labels, commands.items(), strict=False)]
    return "\n".join(lines)


class _Help(argparse.HelpFormatter):
    """Text with lines of its own stays as it is; other text fills the lines of the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Command(argparse.ArgumentParser):
    """The parser of a subcommand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)


class _Parser(_Command):
    """The parser of the command itself: its help is the overview, and a wrong name gets a suggestion."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: {self.usage}\n{self.prog}: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="lightconv",
        usage="lightconv COMMAND [options]    (lightconv COMMAND --help: its options)",
        description="LightConv, DynamicConv and TaLK convolutions: train, evaluate and use them.\n\n" + overview(),
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", action="version", version=f"lightconv {lightconv_plugin.__version__}", help=argparse.SUPPRESS
    )
    return parser


def subparser(name: str) -> argparse.ArgumentParser:
    """The parser of a subcommand; if there is no such subcommand, suggests similar names and exits."""
    known = [name for commands in COMMANDS.values() for name in commands]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else "lightconv --help lists the commands"
        _parser().error(f"there is no command {name!r}: {hint}")
    commands = argparse.ArgumentParser(prog="lightconv").add_subparsers(parser_class=_Command)
    module = importlib.import_module(f"lightconv_plugin.cli.{name.replace('-', '_')}")
    module.add_parser(commands)
    commands.choices[name].set_defaults(run=module.run)
    return commands.choices[name]


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand, including those that it passes on."""
    rest = None
    if before := parser.get_default("before"):
        argv = before(argv)
    if parser.get_default("rest") is not None and "--" in argv:
        # Passed on unparsed; argparse would take the first one for a positional argument.
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    args, unknown = parser.parse_known_args(argv)
    if parser.get_default("unknown") is not None:
        args.unknown = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest is not None:
        args.rest = rest
    return args


def _with_options(message: str, parser: argparse.ArgumentParser) -> str:
    """The message with each `parameter` replaced by the option of this parser."""
    options = {
        action.dest: next((option for option in action.option_strings if option.startswith("--")), action.metavar)
        for action in parser._actions
    }
    return re.sub(r"`(\w+)`", lambda match: str(options.get(match[1]) or match[0]), message)


def _missing(error: ModuleNotFoundError) -> str | None:
    """The message about a module that is not installed; None if no extra installs it."""
    top = (error.name or "").partition(".")[0]
    module = top.replace("-", "_")  # whoever asks for a version gives the distribution's name, such as subword-nmt
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return extra and f"{top} is not installed: {how_to_get(extra)}"


def _leave(signum, frame):
    """Turn SIGTERM into an exception, so that temporary files are removed on exit."""
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lightconv` with these arguments (default: sys.argv) and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        top = _parser()
        top.parse_args(argv)
        top.error("a command is needed: lightconv --help lists them")
    name, *arguments = argv
    parser: argparse.ArgumentParser | None = None
    if sys.stderr is None:  # closed by whoever started this process
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
            stream.reconfigure(errors="backslashreplace")  # a character that cannot be shown loses no result
    previous, thresholds = signal.signal(signal.SIGTERM, _leave), gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        parser = subparser(name)
        args = _parse(parser, arguments)
        args.command = name
        status = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not (gone := [stream for stream in (sys.stdout, sys.stderr) if _reader_has_gone(stream)]):
            return _failed(name, str(error))  # another pipe, such as that of --output
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # nothing may be flushed at exit
        return 128 + signal.SIGPIPE
    except (InputError, OSError) as error:
        return _failed(name, _with_options(str(error), parser) if parser else str(error))
    except ModuleNotFoundError as error:
        if (message := _missing(error)) is None:
            raise
        return _failed(name, message)
    except KeyboardInterrupt:
        print(f"lightconv {name}: interrupted", file=sys.stderr)
        return 130
    finally:
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGTERM, previous)


def _reader_has_gone(stream: TextIO | None) -> bool:
    """Whether this is a pipe, or a socket, whose other end is closed."""
    if stream is None:
        return False
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)  # errors alone
    except (OSError, ValueError):  # it is no file
        return False
    return bool(poll.poll(0))


def _failed(name: str, message: str) -> int:
    print(f"lightconv {name}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
