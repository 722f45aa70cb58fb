"""argparse types and argument groups shared by the commands and the recipes."""

import argparse
import math
from pathlib import Path

from lightconv_plugin.files import check_folder

MOST = 2**31 - 1  # of whole numbers: native code holds many of them in 32 bits


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) >= least):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    if len(text) > 20 or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST:,}, got {text:.40}")
    return int(text)


def folder_as_typed(text: str) -> Path:
    """The path of a folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return Path(text)


def folder(text: str) -> Path:
    """The absolute path of a folder, without links.

    Raises InputError for a file, and for a broken link, such as to a disk that is not mounted.
    """
    path = folder_as_typed(text).absolute()
    check_folder(path)
    return path.resolve()


def place(text: str) -> str:
    """An address without trailing slashes, or the absolute path of a folder."""
    return text.rstrip("/") if "://" in text else str(folder(text))


def number(text: str) -> float:
    """The text as a number, nan if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def ratio(text: str) -> float:
    """A number of at least 1."""
    if not 1 <= number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return number(text)


def probability(text: str) -> float:
    """A number above 0 and below 1."""
    if not 0 < number(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1, got {text!r}")
    return number(text)


def places_first(argv: list[str]) -> list[str]:
    """The arguments, but existing files with a leading dash among the first two become ./FILE, so not an option."""
    places = [
        f"./{argument}" if argument.startswith("-") and Path(argument).exists() else argument for argument in argv[:2]
    ]
    return places + argv[2:]


def add_force(parser: argparse._ActionsContainer, written: str) -> None:
    """--force, for a command that writes what its user names: `check_new_file` and `check_new_directory` ask for it."""
    parser.add_argument("--force", action="store_true", help=f"replace {written} (default: refuse)")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """The options about how a checkpoint's training text was prepared."""
    text = parser.add_argument_group("how a checkpoint's text was prepared (default: as in corpus.json)")
    text.add_argument("-s", "--source-lang", metavar="XX")
    text.add_argument("-t", "--target-lang", metavar="XX")
    text.add_argument(
        "--bpe-codes", metavar="FILE", help="merges of subword-nmt; none: the text is in subwords already"
    )
    text.add_argument("--sentencepiece", type=Path, metavar="MODEL", help="sentencepiece model")
    text.add_argument(
        "--tokenizer", choices=("moses", "moses-a", "none"),
        help="moses-a: with a-b split into a @-@ b, as by tokenizer.perl -a and fairseq's --tokenizer moses; also "
        "determines how translations are detokenised",
    )  # fmt: skip
    text.add_argument("--lowercase", action="store_true", help="lower-case the text of both sides first")
