"""`lightconv released`: list, download and export the models that the papers' authors released.

Standard output of `lightconv released NAME` is the folder of the model alone.
"""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import place
from lightconv_plugin.errors import InputError
from lightconv_plugin.progress import say

DESCRIPTION = """\
Without NAME, lists the released models. With NAME, downloads a model, unpacks it, and exports it to a directory with
its dictionaries, merges, tokeniser and search settings. Then `lightconv translate NAME` and Translator("NAME") use it.
Standard output is the folder of the model, with model.pt for fairseq-generate and exported/ for everything else.

An interrupted download is resumed by the same command. Size and checksum of each file are recorded when it is first
seen (nothing is published to compare them with), and every later download must match. Nothing in a file is executed.

The models are kept in the folder "released" of LIGHTCONV_HOME, or of ~/.cache/lightconv."""
EXAMPLE = """\
example:
  lightconv released dynamicconv.glu.wmt16.en-de
  echo 'Hello world!' | lightconv translate dynamicconv.glu.wmt16.en-de
  lightconv reproduce released/dynamicconv.glu.wmt16.en-de

TaLK's models are on pages that no program can read: download them by hand, the model (.pt) and its test set (.zip).
  lightconv released talkconv.iwslt14.de-en --file model.pt --test-file test.zip"""
_HEADER = ("name", "task", "parameters", "paper's BLEU", "download", "licence", "cached")


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.released import cache

    given = {name: getattr(args, name) for name in ("dtype", "url", "file", "test_file")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.clear:
        if given:
            raise InputError(f"`{next(iter(given))}` is not valid with --clear")
        freed, left = cache.clear(args.name)
        say(f"{freed / 1e6:,.1f} MB deleted")
        if left:
            say(f"left in {cache.home()}, not of a released model: {', '.join(left)}")
    elif args.name is None:
        if given:
            raise InputError(f"`{next(iter(given))}` needs the NAME of a model: lightconv released lists them")
        print(overview())
    else:
        _get(args)
    return 0


def _get(args: argparse.Namespace) -> None:
    from lightconv_plugin.released import cache, fetch
    from lightconv_plugin.released.models import find

    model = find(args.name)
    if args.file is not None and args.url is not None:
        raise InputError("give `file` or `url`, not both")
    if args.test_file is not None:  # first: a checkpoint alone takes its dictionaries from there
        fetch.get_test_set(model, file=args.test_file)
    folder = fetch.get(model, place=args.url, file=args.file, dtype=args.dtype)
    say(f"{model.name}: {cache.size(cache.exported(model)) / 1e6:,.1f} MB in {folder.name}/{cache.EXPORTED}")
    print(folder)


def overview() -> str:
    """The table of the released models, and where they are kept."""
    from lightconv_plugin.released import cache
    from lightconv_plugin.released.models import MODELS

    table = cache.known()
    rows = [_HEADER, *(_row(model, table) for model in MODELS.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, f"cache: {cache.home()}, {cache.size(cache.home()) / 1e6:,.1f} MB"])


def _row(model, table) -> tuple[str, ...]:
    from lightconv_plugin.released import cache
    from lightconv_plugin.released.models import LICENCE

    size = table.get(model.archive.rpartition("/")[2], {}).get("bytes")
    parameters = table.get(model.folder, {}).get("parameters")
    return (
        model.name,
        model.task.name,
        f"{parameters:,}" if parameters else "-",
        model.bleu or "-",
        f"{size / 1e6:,.1f} MB" if size else "-",
        LICENCE,
        "yes" if cache.exported(model).is_dir() else "-",
    )


def add_parser(commands) -> None:
    parser = commands.add_parser("released", description=DESCRIPTION, epilog=EXAMPLE)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to get, as in the list")
    parser.add_argument(
        "--dtype", choices=("float32", "int8"), help="type of the weights (default: as exported before, else float32)"
    )
    parser.add_argument(
        "--url", type=place, metavar="PLACE", help="address or folder that has upstream's files, such as a mirror"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="the archive, or TaLK's checkpoint, if you have it")
    parser.add_argument("--test-file", type=Path, metavar="FILE", help="the archive of the test set, if you have it")
    parser.add_argument("--clear", action="store_true", help="delete NAME, or without NAME all models and records")
