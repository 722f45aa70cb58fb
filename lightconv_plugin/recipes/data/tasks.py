"""The corpora that can be prepared, and what all preparations share: options, disk space check, downloads, stages."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lightconv_plugin.errors import InputError, need_modules
from lightconv_plugin.paths import configs_dir, workspace
from lightconv_plugin.recipes.data import cnndm, gbw, iwslt14, options, parallel_text, wmt, wmt16
from lightconv_plugin.recipes.data.download import fetch, need_disk, no_space, published_files, sources
from lightconv_plugin.recipes.data.language_model import WIKITEXT2, WIKITEXT103, plan_files
from lightconv_plugin.recipes.data.options import Options, Parser, Request, as_typed, make_parser, make_request
from lightconv_plugin.recipes.data.stages import Plan
from lightconv_plugin.recipes.steps import check_own


@dataclass(frozen=True)
class Task:
    """A corpus.

    plan       the stages, once the published files are in `request.data`
    names      the task's own options, besides those that all tasks have
    defaults   of all options
    data, out  default folders, relative to the workspace; {out} is the output folder, {variant} as in `Request`;
               data is "" if only the user can provide the text
    published  the text is downloaded; if False, it is generated or the user's own
    own_files  a folder given by the user may hold files with other names and contents: they are not checked
    modules    optional packages that the stages need
    """

    plan: Callable[[Request], Plan]
    names: tuple[str, ...] = ()
    defaults: Options = field(default_factory=Options)
    data: str = "{out}/download"
    out: str = "data/{variant}"
    published: bool = True
    own_files: bool = False
    modules: tuple[str, ...] = ()


_MULTI30K = Options(bpe=4000, src="en", tgt="de", train_prefix="train", valid_prefix="val")
TASKS = {
    "multi30k_en_de": Task(
        parallel_text.plan_multi30k, options.PARALLEL, _MULTI30K, data="data/multi30k", own_files=True
    ),
    "iwslt14_de_en": Task(iwslt14.plan, ("bpe",), Options(bpe=iwslt14.MERGES)),
    "wmt16_en_de": Task(wmt16.plan),
    "wmt14_en_de": Task(wmt.plan, ("bpe", "separate_dictionaries", "icml17"), Options(bpe=40_000)),
    "wmt14_en_fr": Task(wmt.plan, ("bpe", "separate_dictionaries"), Options(bpe=40_000)),
    "wmt17_zh_en": Task(wmt.plan, ("bpe", "without_cwmt"), Options(bpe=32_000), modules=("jieba",)),
    "cnndm": Task(cnndm.plan, ("bpe",), Options(bpe=30_000)),
    "gbw": Task(gbw.plan, ("threshold",), Options(threshold=3)),  # the benchmark's own threshold
    "wikitext103": Task(
        partial(plan_files, name="wikitext-103-v1.zip", expected=WIKITEXT103, entries=267_744), options.SIZES
    ),
    "wikitext2": Task(
        partial(plan_files, name=".", expected=WIKITEXT2, entries=33_280),
        options.SIZES,
        data="data/wikitext-2",
        own_files=True,
    ),
    "parallel": Task(
        parallel_text.plan, options.PARALLEL + options.OWN_TEXT, Options(lowercase=False), data="", published=False
    ),
    "smoke": Task(
        parallel_text.plan_smoke,
        options.PARALLEL,
        Options(bpe=300, src="en", tgt="de"),
        data="{out}/text",
        out="runs/smoke/data",
        published=False,
    ),
}


def find(name: str) -> Task:
    """The task with this name. Otherwise InputError, which says how the text is prepared, or suggests another name."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the tasks are {', '.join(TASKS)}"
        if words := _own_text(name):
            hint = f"it is text that you provide in a folder DIR: lightconv prepare {words} --data DIR"
        raise InputError(f"there is no task {name!r}: {hint}")
    return TASKS[name]


def _own_text(name: str) -> str:
    """Of a folder of recipes for text that cannot be downloaded: its task and options. "" for other names."""
    file = configs_dir() / name / "protocol.yaml"
    found = re.search(r"^prepare: (parallel .*)", file.read_text(encoding="utf-8"), re.M) if file.is_file() else None
    return found[1] if found else ""


def variant_of(name: str, chosen: Options) -> str:
    """The variant of a task that these options choose: wmt14_en_de_icml17, or the user's own name."""
    changes = [flag for flag in ("icml17", "without_cwmt") if getattr(chosen, flag)]
    return chosen.name or "_".join([name, *changes])


def folder_of(name: str, chosen: Options) -> Path:
    """The folder that a task with these options fills."""
    return chosen.out or workspace() / find(name).out.format(variant=variant_of(name, chosen))


def parser_of(name: str) -> Parser:
    """The parser of a task's options. InputError if there is no such task."""
    task = find(name)
    place = task.data.format(out="OUT")
    made = "downloaded" if task.published else "written"
    names = (*options.BASIC, *(options.DOWNLOAD if task.published else ()), *task.names)
    shown = {
        "data": f"without it, it is {made} to {place}" if place else "needed",
        "out": task.out.format(variant=name),
    }
    return make_parser(f"lightconv prepare {name}", sources()["about"][name], task.defaults, names, **shown)


def parse(name: str, words: Sequence[str]) -> Options:
    """The options of a task as typed on the command line, such as ["--bpe", "2000"]. InputError if they are wrong."""
    return replace(find(name).defaults, **vars(parser_of(name).parse_args(list(words))))


def prepare(name: str, words: Sequence[str] = ()) -> Request:
    """`run` with options as typed on the command line; its errors name them so, too."""
    try:
        return run(name, parse(name, words))
    except InputError as error:
        raise InputError(as_typed(str(error))) from error


def run(name: str, chosen: Options) -> Request:
    """Prepare the corpus of a task: download what is missing, check it, tokenise, encode and binarise it.

    Finished stages are not repeated; after an interruption, the same call resumes.

    Args:
        name: one of TASKS, such as multi30k_en_de
        chosen: such as replace(TASKS[name].defaults, bpe=2000)

    Returns:
        The request: where the data is, and with which options it was made.

    Raises:
        InputError: an unknown task, a wrong option, damaged or unexpected data, a failed download, a full disk.
        OSError: a folder that cannot be written.
        ModuleNotFoundError: fairseq is not installed.
    """
    task = find(name)
    request = make_request(chosen, variant_of(name, chosen), task.data, folder_of(name, chosen))
    need_modules("fairseq_cli")  # the last stage starts it
    for module in task.modules:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{name} needs the package {module}, which is not installed: pip install {module}")
    check_own(request.out, [request.out / "data-bin"])  # before a download; a plan knows all outputs
    try:
        if task.published and not (task.own_files and chosen.data):
            obtain(request)
        task.plan(request).run()
    except OSError as error:
        if not no_space(error):
            raise
        where = f" for {error.filename}" if error.filename else ""
        raise InputError(
            f"no space left on the disk{where}: free some and run the same command again to resume"
        ) from error
    return request


def obtain(request: Request) -> None:
    """Check the free disk space and fetch a task's published files."""
    disk = sources()["disk"].get(request.variant, {})
    if not request.options.any_size:  # the requirements apply to the published data
        if "download" in disk and not request.options.data:
            need_disk(disk["download"], [request.data])
        if "out" in disk:
            need_disk(disk["out"], [request.out])
    for published in published_files(request.variant):
        fetch(published, request)
