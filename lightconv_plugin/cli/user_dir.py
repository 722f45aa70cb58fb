"""`lightconv user-dir`: print the path for fairseq's --user-dir."""

import argparse

from lightconv_plugin.paths import package_dir


def run(args: argparse.Namespace) -> int:
    print(package_dir())
    return 0


def add_parser(commands) -> None:
    commands.add_parser(
        "user-dir", description='Prints the folder of the plugin: fairseq-train --user-dir "$(lightconv user-dir)" …'
    )
