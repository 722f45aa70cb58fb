"""`lightconv reproduce`: prepare, train, tune and score a published system: one row of the results."""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import folder_as_typed
from lightconv_plugin.cli.interruptible import interruptible
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import configs_dir

DESCRIPTION = """\
Prepares the data, trains the configuration with each seed, chooses the number of averaged checkpoints and the length
penalty on the validation set, and scores the test set: one row of the results. protocol.yaml next to the configuration
defines each step. Rerun the same command to resume; a step is repeated only if something it depends on has changed.

CONFIG is the name of a configuration such as iwslt14_de_en/dynamicconv, or a path. Overrides are those of
`lightconv train`, for the training. Those that change what is computed need --runs, as do other data and options of
the preparation that change its result.

A seed is trained in SAVE_DIR/seedN; an existing training with the same settings is resumed, or taken over if it is
finished. By default, the row is written to results/reproduction/TASK/SYSTEM.json (in a checkout:
benchmarks/results/reproduction) and the table to RESULTS.md; a row that needs --runs and its table, to RUNS/results,
which --table --runs DIR rewrites. Seeds already in the row are kept if they have the same configuration, settings,
protocol and data.

CONFIG may be released/NAME, one of the models that `lightconv released` lists: it is downloaded if necessary, and
upstream's binarised test set is translated with the published beam and length penalty."""
EXAMPLE = """\
example:
  lightconv reproduce iwslt14_de_en/dynamicconv --seeds 1 2 3
  lightconv reproduce released/dynamicconv.glu.wmt16.en-de
  lightconv reproduce --table        rewrite the table from the rows
  lightconv reproduce --smoke        everything in miniature, in runs/smoke: a test, not a result"""

_RELEASED = "released/"  # before the name of a released model
_WITH_VALUE = ("--runs", "--results", "--prepare-options", "--url")  # the next argument is theirs, even if it has a "="


def run(args: argparse.Namespace) -> int:
    if args.config and args.config.startswith(_RELEASED):
        return _released(args)
    for name in ("from_text", "url"):
        if getattr(args, name):
            raise InputError(f"`{name}` is for released models, such as {_RELEASED}dynamicconv.glu.wmt16.en-de")
    if args.table:
        if args.config or args.seeds or args.smoke or args.rest or args.no_prepare or args.prepare_options:
            raise InputError("--table takes no configuration, seeds, overrides or preparation: it only writes a table")
        return _write_table(args.results, args.runs)
    if args.smoke and (args.config or args.seeds):
        raise InputError("--smoke has its own configuration and seeds: remove CONFIG and --seeds")
    if not args.smoke and not args.config:
        raise InputError("CONFIG is missing, such as multi30k_en_de/dynamicconv")
    if not args.smoke and not args.seeds:
        raise InputError("--seeds is missing: one or more numbers, such as --seeds 1 2 3")
    from lightconv_plugin.progress import say
    from lightconv_plugin.recipes.reproduce.job import plan, plan_smoke
    from lightconv_plugin.recipes.reproduce.run import reproduce

    options = {
        "overrides": args.rest,
        "runs": args.runs,
        "results": args.results,
        "prepare": not args.no_prepare,
        "prepare_options": args.prepare_options,
    }
    job = plan_smoke(**options) if args.smoke else plan(args.config, args.seeds, **options)

    def work() -> None:
        done = reproduce(job)
        print(done.section, flush=True)
        say(f"row: {done.row}; table: {done.table}")

    return interruptible("reproduce", work)


def _released(args: argparse.Namespace) -> int:
    if args.table or args.seeds or args.smoke or args.rest or args.runs or args.no_prepare or args.prepare_options:
        raise InputError(f"{args.config} is trained already: only --results, --url and --from-text are valid")
    from lightconv_plugin.progress import say
    from lightconv_plugin.recipes.reproduce.released import reproduce_released

    name = args.config.removeprefix(_RELEASED)
    done = reproduce_released(name, place=args.url, from_text=args.from_text, results=args.results)
    print(done.section, flush=True)
    say(f"row: {done.row}; table: {done.table}")
    return 0


def _write_table(results: Path | None, runs: Path | None) -> int:
    from lightconv_plugin.progress import say
    from lightconv_plugin.recipes.reproduce.table import default_results, default_table, write_table

    if results is None and runs is not None:
        results = runs / "results"
    if results is not None and not results.is_dir():
        raise InputError(f"--table: there is no folder {results}")
    if results is not None and not next(results.rglob("*.json"), None):
        raise InputError(f"--table: {results} has no rows (TASK/SYSTEM.json): run CONFIG --seeds N… first")
    table = results / "RESULTS.md" if results else default_table()
    write_table((results or default_results()).resolve(), table, configs_dir(), not_run=results is None)
    say(f"table: {table}")
    return 0


def overrides_last(argv: list[str]) -> list[str]:
    """The arguments with hydra's overrides, which may appear anywhere, moved to the end after a "--"."""
    from lightconv_plugin.recipes.reproduce.protocol import OVERRIDE

    overrides: list[str] = []
    others: list[str] = []
    for before, item in zip(["", *argv], argv, strict=False):
        is_override = OVERRIDE.fullmatch(item) and before not in _WITH_VALUE
        (overrides if is_override else others).append(item)
    return [*(item for item in others if item != "--"), "--", *overrides]


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "reproduce",
        usage="lightconv reproduce CONFIG --seeds N… [options] [overrides]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds, with one training each")
    parser.add_argument(
        "--runs", type=folder_as_typed, metavar="DIR",
        help="put trainings into DIR/TASK/SYSTEM instead of checkpoint.save_dir",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=folder_as_typed, metavar="DIR",
        help="put the row into DIR/TASK/SYSTEM.json and the table into DIR/RESULTS.md",
    )  # fmt: skip
    parser.add_argument("--no-prepare", action="store_true", help="use the data without preparing it")
    parser.add_argument(
        "--prepare-options", default="", metavar="OPTIONS",
        help="options for lightconv prepare, as one argument, such as --prepare-options='--mirror PLACE'",
    )  # fmt: skip
    parser.add_argument(
        "--from-text", action="store_true", help="of a released model: translate sacreBLEU's raw test set instead"
    )
    parser.add_argument(
        "--url", metavar="PLACE", help="of a released model: address or folder that has upstream's files"
    )
    parser.add_argument("--smoke", action="store_true", help="everything in miniature, with its own configuration")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.set_defaults(rest=[], before=overrides_last)
