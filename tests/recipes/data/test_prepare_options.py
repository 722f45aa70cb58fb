"""What `lightconv prepare` checks before its first step: options, the task's name, published files, free disk space."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest

from lightconv_plugin.cgroups import cores
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import tasks
from lightconv_plugin.recipes.data.download import need_disk
from lightconv_plugin.recipes.data.options import make_request
from tests.recipes.data.miniatures import PUBLISHED
from tests.recipes.data.preparations import prepare


def chosen(*words):
    """The request that `lightconv prepare wmt16_en_de` makes of these words."""
    options = tasks.parse("wmt16_en_de", words)
    return make_request(options, "x", "{out}/down", tasks.folder_of("wmt16_en_de", options))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], ["{}/home/data/wmt16_en_de/down", "{}/home/data/wmt16_en_de", "None", None, False]),
        (["--out", "o", "--workers", "3"], ["{}/o/down", "{}/o", "None", 3, False]),
        (["--data", "."], ["{}", "{}/home/data/wmt16_en_de", "None", None, False]),
        (
            ["--mirror", "m/", "--any-size"],
            ["{}/home/data/wmt16_en_de/down", "{}/home/data/wmt16_en_de", "{}/m", None, True],
        ),
        (
            ["--mirror", "http://a/b/"],
            ["{}/home/data/wmt16_en_de/down", "{}/home/data/wmt16_en_de", "http://a/b", None, False],
        ),
    ],
)
def test_options(tmp_path, monkeypatch, arguments, expected):
    """Defaults are in the workspace, whose folder LIGHTCONV_HOME names; what is given, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTCONV_HOME", str(tmp_path / "home"))
    expected[3] = expected[3] or cores()
    made = chosen(*arguments)
    options = made.options
    assert [str(made.data), str(made.out), str(options.mirror), options.workers, options.any_size] == [
        value.format(tmp_path) if isinstance(value, str) else value for value in expected
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("wmt16_en_de --data nowhere", "--data: there is no folder {}/nowhere"),
        ("wmt16_en_de --data . --mirror m", "--mirror is not valid with --data, from which nothing is downloaded"),
        ("wmt16_en_de --bpe 3", "unrecognized arguments: --bpe 3"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    said = prepare(tmp_path / "home", *arguments.split(), status=2)
    assert said == f"lightconv prepare: error: {message.format(tmp_path)}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, hint",
    [
        ("multi30k", "did you mean multi30k_en_de?"),
        (
            "tatoeba_de_en",
            "it is text that you provide in a folder DIR: lightconv prepare parallel --name tatoeba_de_en --src de "
            "--tgt en --test-lines 2500 --bpe 8000 --data DIR",
        ),
        ("wmt14_ende", "did you mean wmt14_en_de?"),
        ("x", f"the tasks are {', '.join(tasks.TASKS)}"),
    ],
)
def test_a_wrong_task_suggests_the_nearest(name, hint, tmp_path):
    said = prepare(tmp_path, name, status=2)
    assert said == f"lightconv prepare: error: there is no task {name!r}: {hint}\n"


def test_every_published_file_is_complete():
    """Each is of a task that downloads, has a checksum of a known form, and an address or what to do without one."""
    variants = {*tasks.TASKS, "wmt14_en_de_icml17", "wmt17_zh_en_without_cwmt"} - {"smoke", "parallel"}
    table = tasks.sources()
    assert set(table["disk"]) == variants == {task for group in table["files"] for task in group["tasks"]}
    for variant in variants:
        files = tasks.published_files(variant)
        assert len({published.name for published in files}) == len(files) > 0
        for published in files:
            kind, _, value = published.checksum.partition(":")
            lengths = {"record": 0, "sha256": 64, "text": 64, "md5": 32, "blob": 40}
            assert len(value) == lengths[kind] and set(value) <= set("0123456789abcdef")
            assert published.address.startswith("https://") or published.absent


def published(task, folder):
    """The miniature of a task's files, in the order in which they are fetched."""
    folder.mkdir()
    PUBLISHED[task](folder)
    return [folder / file.name for file in tasks.published_files(task)]


@pytest.mark.parametrize("task", [task for task in PUBLISHED if not tasks.TASKS[task].own_files])
def test_only_the_published_files_are_accepted(task, tmp_path, monkeypatch):
    """Of another text, the first file with a known checksum is refused; of any text, a file that is cut short."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 30))
    paths = published(task, tmp_path / "data")
    call = (task, "--data", tmp_path / "data", "--out", tmp_path / "out")
    known = {file.name: file.checksum for file in tasks.published_files(task) if file.checksum != "record"}
    for name, checksum in list(known.items())[:1]:
        last = prepare(tmp_path, *call, status=2).splitlines()[-1]
        assert f"{name} is not the expected file: its checksum is " in last
        assert last.endswith(f", expected {checksum.partition(':')[2]}")
    paths[0].write_bytes(paths[0].read_bytes()[:-30])
    for option, place in (("--data", tmp_path / "data"), ("--mirror", tmp_path / "data")):
        said = prepare(tmp_path, task, option, place, "--out", tmp_path / "out", "--any-size", status=2)
        assert re.search(rf"{paths[0].name} is not the expected file: .* cut short", said.splitlines()[-1])
        assert not list(tmp_path.glob(f"out/**/{paths[0].name}*")) and not (tmp_path / "out/raw").exists()


def test_free_disk_space_is_required_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 << 30))
    need_disk(1.9, [tmp_path / "a/b", tmp_path / "c"])
    with pytest.raises(InputError) as caught:
        need_disk(2.5, [tmp_path / "a/b"])
    assert str(caught.value) == f"{tmp_path}/a/b needs 2.5 GiB of free disk space, 2.0 GiB are free"
    (tmp_path / "a/b").mkdir(parents=True)  # what is in it already counts
    (tmp_path / "a/b/archive").write_bytes(os.urandom(8 << 20))
    need_disk(2.005, [tmp_path / "a/b"])
    with pytest.raises(InputError):
        need_disk(2.01, [tmp_path / "a/b"])


def test_data_of_any_size_need_no_known_disk_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (tmp_path / "de-en.tgz").write_bytes(b"x")
    places = ("--data", tmp_path, "--out", tmp_path / "out")
    assert "needs 0.5 GiB of free disk space" in prepare(tmp_path, "iwslt14_de_en", *places, status=2)
    assert "de-en.tgz is not the expected file" in prepare(tmp_path, "iwslt14_de_en", *places, "--any-size", status=2)
