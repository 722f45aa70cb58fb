"""The corpora that can be prepared, and what all preparations share: options, disk space check, downloads, steps."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import (
    cnndm,
    gbw,
    iwslt14,
    multi30k,
    parallel,
    smoke,
    wikitext2,
    wikitext103,
    wmt,
    wmt16,
    wmt_tasks,
)
from lightconv_plugin.recipes.data.download import Published, fetch, need_disk, no_space
from lightconv_plugin.recipes.data.request import Parser, Request, make_parser, make_request


@dataclass(frozen=True)
class Task:
    """A corpus.

    about        for --help; its first line is the title
    run          runs the steps once the published files are in `request.data`
    add_options  the task's own options
    data, out    default folders, relative to the workspace; {out} is the output folder, {variant} as in `Request`;
                 data is "" if only the user can provide the text
    published    the text is downloaded; if False, it is generated or the user's own
    own_files    a folder given by --data may hold files with other names and contents: they are not checked
    modules      optional packages that the steps need
    """

    about: str
    run: Callable[[Request], None]
    add_options: Callable[[argparse.ArgumentParser], None]
    data: str = "{out}/download"
    out: str = "data/{variant}"
    published: bool = True
    own_files: bool = False
    modules: tuple[str, ...] = ()


TASKS = {
    "multi30k_en_de": Task(multi30k.ABOUT, multi30k.run, multi30k.add_options, data="data/multi30k", own_files=True),
    "iwslt14_de_en": Task(iwslt14.ABOUT, iwslt14.run, iwslt14.add_options),
    "wmt16_en_de": Task(wmt16.ABOUT, wmt16.run, wmt16.add_options),
    "wmt14_en_de": Task(wmt_tasks.ABOUT_EN_DE, wmt.run, wmt_tasks.add_options_en_de),
    "wmt14_en_fr": Task(wmt_tasks.ABOUT_EN_FR, wmt.run, wmt_tasks.add_options_en_fr),
    "wmt17_zh_en": Task(wmt_tasks.ABOUT_ZH_EN, wmt.run, wmt_tasks.add_options_zh_en, modules=("jieba",)),
    "cnndm": Task(cnndm.ABOUT, cnndm.run, cnndm.add_options),
    "gbw": Task(gbw.ABOUT, gbw.run, gbw.add_options),
    "wikitext103": Task(wikitext103.ABOUT, wikitext103.run, wikitext103.add_options),
    "wikitext2": Task(wikitext2.ABOUT, wikitext2.run, wikitext2.add_options, data="data/wikitext-2", own_files=True),
    "parallel": Task(parallel.ABOUT, parallel.run, parallel.add_options, data="", published=False),
    "smoke": Task(smoke.ABOUT, smoke.run, smoke.add_options, data="{out}/text", out="runs/smoke/data", published=False),
}


def sources() -> dict[str, Any]:
    """The content of sources.toml."""
    return tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))


def published_files(variant: str) -> list[Published]:
    """The published files of a variant of a task, in download order."""
    found = []
    for group in sources()["files"]:
        if variant in group["tasks"]:
            for name, checksum in group["checksums"].items():
                address = group.get("address", "")
                address += name if address.endswith("/") else ""
                found.append(Published(name, address, checksum, group.get("absent", "")))
    return found


def find(name: str) -> Task:
    """The task with this name. Otherwise InputError, which suggests the closest name."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the tasks are {', '.join(TASKS)}"
        raise InputError(f"there is no task {name!r}: {hint}")
    return TASKS[name]


def parser_of(name: str) -> Parser:
    """The parser of a task's options. InputError if there is no such task."""
    task = find(name)
    default_data = task.data.format(out="OUT")
    default_out = task.out.format(variant=name)
    parser = make_parser(f"lightconv prepare {name}", task.about, default_data, default_out, task.published)
    parser.set_defaults(variant=name)
    task.add_options(parser)
    return parser


def prepare(name: str, arguments: Sequence[str] = ()) -> None:
    """Prepare the corpus of a task: download what is missing, check it, tokenise, encode and binarise it.

    Finished steps are not repeated; after an interruption, the same call resumes.

    Args:
        name: one of TASKS, such as multi30k_en_de
        arguments: command-line options: --data, --out, --mirror, --workers, --any-size and the task's own options

    Raises:
        InputError: an unknown task, a wrong argument, damaged or unexpected data, a failed download, a full disk.
        OSError: a folder that cannot be written.
    """
    task = find(name)
    args = parser_of(name).parse_args(list(arguments))
    request = make_request(args, task.data, task.out.format(variant=args.variant))
    for module in task.modules:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{name} needs the package {module}, which is not installed: pip install {module}")
    try:
        if task.published and not (task.own_files and request.data_given):
            obtain(request)
        task.run(request)
    except OSError as error:
        if not no_space(error):
            raise
        where = f" for {error.filename}" if error.filename else ""
        raise InputError(
            f"no space left on the disk{where}: free some and run the same command again to resume"
        ) from error


def obtain(request: Request) -> None:
    """Check the free disk space and fetch a task's published files."""
    disk = sources()["disk"].get(request.variant, {})
    if not request.any_size:  # the requirements apply to the published data
        if "download" in disk and not request.data_given:
            need_disk(disk["download"], [request.data])
        if "out" in disk:
            need_disk(disk["out"], [request.out])
    for published in published_files(request.variant):
        fetch(published, request)
