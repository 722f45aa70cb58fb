"""What a call of scripts/reproduce.sh asks for: its arguments, and the job they make, checked before it begins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.recipes.reproduce.protocol import (
    OVERRIDE,
    ROOT,
    Protocol,
    ProtocolError,
    flatten,
    is_machine,
    load_yaml,
    read_protocol,
    settings_of,
    split_override,
    split_words,
)
from lightconv_plugin.recipes.reproduce.table import RESULTS, SEEDS, SMOKE, TABLE

SMOKE_CONFIG = ROOT / "configs/smoke/dynamicconv.yaml"
SMOKE_SEEDS = (1, 2)


@dataclass(frozen=True)
class Job:
    """One row: of which configuration, with which seeds, where. Paths are absolute; `changing` are those of the
    overrides that change what is computed."""

    config: Path
    system: str
    protocol: Protocol
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    changing: tuple[str, ...]
    settings: dict[str, str]
    folder: Path
    data: Path
    target_lang: str | None
    prepare: tuple[str, ...]
    results: Path
    table: Path


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; those that look like hydra's overrides may stand anywhere."""
    overrides = [item for item in argv if OVERRIDE.fullmatch(item)]
    parser = argparse.ArgumentParser(prog="reproduce.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--results", type=Path, metavar="DIR")
    parser.add_argument("--no-prepare", dest="prepare", action="store_false")
    parser.add_argument("--prepare-options", default="", metavar="OPTIONS")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args([item for item in argv if item not in overrides])
    args.overrides = overrides
    if args.table:
        if args.config or args.seeds or args.smoke or overrides:
            parser.error("--table takes no configuration, seeds or overrides: it only writes the table")
        return args
    if args.smoke:
        if args.config or args.seeds:
            parser.error("--smoke has a configuration and seeds of its own")
        args.config, args.seeds = SMOKE_CONFIG, list(SMOKE_SEEDS)
        args.runs = args.runs or ROOT / "runs/smoke"
        if not any(item.startswith("task.data=") for item in overrides):
            args.overrides = [*overrides, f"task.data={args.runs.resolve()}/data/data-bin"]
    if args.config is None:
        parser.error("CONFIG.yaml is missing, such as configs/multi30k_en_de/dynamicconv.yaml")
    if not args.seeds:
        parser.error(f"--seeds is missing: one or more numbers, such as --seeds {' '.join(map(str, SEEDS))}")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        parser.error(f"--seeds must be different numbers from 0 on, got {' '.join(map(str, args.seeds))}")
    return args


def plan(args: argparse.Namespace) -> Job:
    """What is to be done, everything checked that can be before it begins.

    Raises:
        ProtocolError: the configuration, its protocol or an override cannot be followed.
    """
    config = args.config.resolve()
    if not config.is_file() or config.suffix != ".yaml":
        raise ProtocolError(f"no configuration {args.config}: a .yaml beside a protocol.yaml, as in configs/*/")
    protocol = read_protocol(config.parent)
    system = config.stem
    if system not in protocol.systems:
        raise ProtocolError(f"{protocol.path}: systems has no {system}; there are: {', '.join(protocol.systems)}")
    content = load_yaml(config)
    flat = flatten(content) if isinstance(content, dict) else {}
    given = dict(split_override(item) for item in args.overrides)
    for key, instead in (("checkpoint.save_dir", "--runs DIR"), ("common.seed", "--seeds N")):
        if key in given:
            raise ProtocolError(f"the override {key} is reproduce.sh's own: give {instead} instead")
    for key in ("checkpoint.save_dir", "task.data"):
        if not isinstance(flat.get(key), str):
            raise ProtocolError(f"{config} has no {key}")
    changing = [item for item in args.overrides if not is_machine(split_override(item)[0])]
    own = config.is_relative_to(ROOT / "configs") and protocol.task != SMOKE and not changing
    if not own and not args.runs:
        what = (
            f"{' '.join(changing)} changes what is computed" if changing else f"{args.config} is none of the results'"
        )
        raise ProtocolError(f"{what}: it needs a place of its own, --runs DIR")
    folder = ROOT / flat["checkpoint.save_dir"]
    if args.runs:
        folder = args.runs.resolve() / protocol.task / system
    data = (ROOT / flat["task.data"]).resolve()
    options = [*split_words(args.prepare_options, "--prepare-options")]
    overrides = list(args.overrides)
    if "task.data" in given:
        data = Path(str(given["task.data"])).resolve()
        overrides = [item for item in overrides if split_override(item)[0] != "task.data"] + [f"task.data={data}"]
        if args.prepare and data.name != "data-bin":
            raise ProtocolError(f"task.data={data} is not a data-bin that could be prepared: add --no-prepare")
        options += ["--out", str(data.parent)]
    elif "--out" in options:
        raise ProtocolError("--prepare-options: instead of --out DIR give task.data=DIR/data-bin")
    results = args.results or (RESULTS if own else args.runs / "results")
    return Job(
        *(
            config,
            system,
            protocol,
            tuple(args.seeds),
            tuple(overrides),
            tuple(changing),
            settings_of(content, args.overrides),
        ),
        *(
            folder.resolve(),
            data,
            given.get("task.target_lang", flat.get("task.target_lang")),
            tuple(options) if args.prepare else ("",),
        ),
        *(results.resolve(), TABLE if results == RESULTS else results.resolve() / "RESULTS.md"),
    )
