"""`lightconv user-dir`: the path that fairseq's --user-dir wants."""

import argparse
from pathlib import Path

import lightconv_plugin


def package_dir() -> Path:
    """The folder this package was imported from.

    Links in it are not resolved: fairseq compares its --user-dir with the package's own `__path__`, as text.
    """
    return Path(lightconv_plugin.__path__[0]).absolute()


def run(args: argparse.Namespace) -> int:
    print(package_dir())
    return 0


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "user-dir",
        help="print the path for fairseq's --user-dir",
        description='Prints the folder of the plugin: fairseq-train --user-dir "$(lightconv user-dir)" …',
    )
    parser.set_defaults(run=run)
