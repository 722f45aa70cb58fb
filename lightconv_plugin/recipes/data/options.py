"""The options of all preparations. Each task has some of them, with defaults of its own: see tasks.py."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from lightconv_plugin.arguments import folder, natural, place, positive, probability, ratio
from lightconv_plugin.cgroups import cores
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import workspace

SPLITS = ("train", "valid", "test")
DISTILLED = Path(".steps/teacher.json")  # in a folder that `lightconv distill` fills


def language(text: str) -> str:
    """The code of a language. fairseq splits the names of binarised data at "." and "-"."""
    if not re.fullmatch(r"\w+", text):
        raise argparse.ArgumentTypeError(f"must be a language code such as de or pt_BR, without -, got {text!r}")
    return text


def plain_name(text: str) -> str:
    """The name of a folder below data/."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"must be letters, digits, . _ and -, got {text!r}; `out` names any folder")
    return text


def expected_size(text: str) -> tuple[str, int, int]:
    """("train", 36718, 2088628) of "train:36718:2088628"."""
    match = re.fullmatch(rf"({'|'.join(SPLITS)}):(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected PART:LINES:TOKENS with one of {', '.join(SPLITS)}, got {text!r}")
    return match[1], int(match[2]), int(match[3])


def _option(default: Any, help: str, type: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """A field of `Options`, and what argparse needs to know about it; {default} in `help` is the task's default."""
    return field(default=default, metadata={"help": help, **more, **({"type": type} if type else {})})


def _flag(help: str) -> Any:
    return _option(False, help, action="store_true")


@dataclass(frozen=True)
class Options:
    """What a user can choose. Paths are absolute; None: by default."""

    data: Path | None = field(
        default=None, metadata={"help": "folder of the text; {default}", "type": folder, "metavar": "DIR"}
    )
    out: Path | None = field(
        default=None, metadata={"help": "folder to fill (default: {default})", "type": folder, "metavar": "DIR"}
    )
    mirror: str | None = _option(None, "address or folder to take the files from", place, metavar="PLACE")
    any_size: bool = _flag("accept other data of the same form: neither checksums nor sizes are compared")
    workers: int = _option(cores(), "processes (default: all cores, {default})", positive, metavar="N")

    src: str | None = _option(None, "source language (default: {default})", language, metavar="XX")
    tgt: str | None = _option(None, "target language (default: {default})", language, metavar="XX")
    train_prefix: str | None = _option(None, "training text: P.SRC and P.TGT (default: {default})", metavar="P")
    valid_prefix: str | None = _option(None, "validation text (default: {default})", metavar="P")
    test_prefix: str = _option("", "test sets (default: by file name)", metavar="P[,P…]")
    bpe: int = _option(10_000, "merges (default: {default})", positive, metavar="N")
    bpe_dropout: float = _option(
        0.0,
        "encode the training text several times, leaving out merges with this probability in all but the first; "
        "0.1 is usual",
        probability,
        metavar="P",
    )
    bpe_copies: int | None = _option(None, "how many times, with `bpe_dropout` (default: 8)", positive, metavar="N")
    bidirectional: bool = _flag(
        "train in both directions: append the training text with its sides exchanged. Needs one dictionary"
    )
    lowercase: bool = _option(True, "lower-case the text (default: %(default)s)", action=argparse.BooleanOptionalAction)
    separate_dictionaries: bool = _flag("one dictionary for each language")
    max_len: int = _option(250, "longest training side in subwords (default: {default})", positive, metavar="N")
    max_ratio: float = _option(9.0, "largest ratio of the two lengths (default: {default:g})", ratio, metavar="R")

    name: str | None = _option(None, "fill data/NAME instead", plain_name, metavar="NAME")
    valid_lines: int = _option(0, "hold out N training pairs for validation", positive, metavar="N")
    test_lines: int = _option(0, "hold out N training pairs as test set", positive, metavar="N")
    split_seed: int = _option(1, "which pairs are held out (default: {default})", natural, metavar="N")
    separate_bpe: bool = _flag("as many merges, and a dictionary, for each language on its own")
    tokenizer: str = _option(
        "moses",
        "moses: Moses' rules; Chinese is segmented by jieba, Japanese by SudachiPy. done: the text is already "
        "tokenised, by Moses' script. none: in another way, with spaces between tokens (default: {default})",
        choices=("moses", "done", "none"),
    )

    icml17: bool = _flag(
        "news-commentary-v9 instead of v12: the training text of WMT14, and of ConvS2S (Gehring et al. 2017)"
    )
    without_cwmt: bool = _flag("train only on news-commentary-v12 and UNv1.0")

    threshold: int = _option(
        0,
        "words seen less often than N times in the training text become <unk> (default: {default})",
        natural,
        metavar="N",
    )
    expect: Sequence[tuple[str, int, int]] = _option(
        (),
        "the known size of a part, with one </s> per line (default: the published one)",
        expected_size,
        metavar="PART:LINES:TOKENS",
        action="append",
    )
    expect_entries: int | None = _option(
        None,
        "the known size of the dictionary (default: the published one, without `threshold`)",
        positive,
        metavar="N",
    )


BASIC = ("data", "out", "workers")
DOWNLOAD = ("mirror", "any_size")  # of tasks with published files
PARALLEL = (
    *("src", "tgt", "train_prefix", "valid_prefix", "test_prefix", "bpe", "bpe_dropout", "bpe_copies"),
    *("bidirectional", "lowercase", "separate_dictionaries", "max_len", "max_ratio"),
)
OWN_TEXT = ("name", "valid_lines", "test_lines", "split_seed", "separate_bpe", "tokenizer")
SIZES = ("threshold", "expect", "expect_entries")


@dataclass(frozen=True)
class Request:
    """The request for a preparation.

    variant  which variant of the task is prepared, by its name in sources.toml
    data     folder of the published files or the text, absolute. If `options.data` names it, it is the user's: nothing
             is downloaded, and nothing in it is changed
    out      output folder, absolute
    """

    variant: str
    data: Path
    out: Path
    options: Options


def make_request(options: Options, variant: str, data: str, out: Path) -> Request:
    """The request for these options.

    Args:
        data: default folder, relative to the workspace; {out} in it is the output folder; "" if only the user can
            provide the text
        out: the output folder
    """
    if options.data is None and not data:
        raise InputError("`data` is missing: it names the folder of your text")
    if options.data is not None and options.mirror:
        raise InputError("`mirror` is not valid with `data`, from which nothing is downloaded")
    if options.data is not None and not options.data.is_dir():
        raise InputError(f"`data`: there is no folder {options.data}")
    if (out / DISTILLED).exists():
        raise InputError(
            f"`out` {out} has a text that lightconv distill made: name another folder (to reproduce with this "
            "one, set `no_prepare`)"
        )
    return Request(variant, options.data or workspace() / data.format(out=out), out, options)


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def as_typed(message: str) -> str:
    """A message in which each `parameter` is replaced by the option that sets it."""
    return re.sub(r"`(\w+)`", lambda match: _typed(match[1]), message)


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_parser(program: str, about: str, defaults: Options, names: Sequence[str], **shown: str) -> Parser:
    """A parser of the options `names`, which sets the fields of `Options`.

    Args:
        about: for --help
        shown: descriptions of defaults, for --help
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=program, description=about, formatter_class=raw, allow_abbrev=False)
    for option in fields(Options):
        if option.name in names:
            parser.add_argument(_typed(option.name), **_argument(option, getattr(defaults, option.name), shown))
    return parser


def _argument(option: Field[Any], default: Any, shown: dict[str, str]) -> dict[str, Any]:
    described = shown.get(option.name, "by file name" if default is None else default)
    about = as_typed(option.metadata["help"].format(default=described))
    if option.metadata.get("action") == "append":
        default = list(default)
    return {**option.metadata, "help": about, "default": default}
