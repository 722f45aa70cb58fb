"""Types of arguments that several commands share."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def not_negative(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def places_first(argv: list[str]) -> list[str]:
    """The arguments; of the first two, existing files with a leading dash become ./FILE, which is no option."""
    places = [
        f"./{argument}" if argument.startswith("-") and Path(argument).exists() else argument for argument in argv[:2]
    ]
    return places + argv[2:]
