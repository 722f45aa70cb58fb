"""What can go wrong before a released model is in the cache: one line about it, and nothing half-written."""

import errno
import hashlib
import io
import json
import re
import shutil
import subprocess

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from lightconv_plugin.checkpoints.exported import open_exported
from lightconv_plugin.checkpoints.loading import count_parameters
from lightconv_plugin.downloads import download
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.released import cache, fetch
from lightconv_plugin.released.models import MODELS
from tests.recipes.conftest import script_environment
from tests.recipes.data.archive_server import LOCAL, tar_of

NAME = "dynamicconv.no_glu.iwslt14.de-en"
MODEL = MODELS[NAME]
ARCHIVE = MODEL.archive.rpartition("/")[2]
BY_HAND = f"fetch it by hand, then: lightconv released {NAME} --file FILE"


def files_of(home):
    """What is in the cache except locks and archives that are not complete."""
    kept = (path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    return sorted(name for name in kept if not name.startswith("downloads/") or not name.endswith(("lock", ".part")))


COMPLETE = [
    *(f"{MODEL.folder}/{name}" for name in ("bpecodes", "dict.de.txt", "dict.en.txt")),
    *(f"{MODEL.folder}/exported/{name}" for name in ("README.md", "config.json", "dict.de.txt", "dict.en.txt")),
    *(f"{MODEL.folder}/exported/{name}" for name in ("generation_config.json", "model.safetensors", "source.bpe")),
    *(f"{MODEL.folder}/exported/{name}" for name in ("text.json", "tokenizer_config.json")),
    f"{MODEL.folder}/model.pt",
    "files.json",
]


def get(lightconv, server, *arguments, status=0):
    return lightconv("released", NAME, "--url", server.address, *arguments, status=status)


def refused(lightconv, server, message, *arguments):
    _, err = get(lightconv, server, *arguments, status=2)
    last = err.splitlines()[-1]
    assert last.startswith("lightconv released: error: ") and re.search(message, last), err
    assert ".tmp" not in last  # the user cannot look at a folder that is gone
    assert "Traceback" not in err


def test_the_list_knows_what_was_seen(world, server, home, lightconv):
    out, _ = lightconv("released")
    (line,) = [line for line in out.splitlines() if line.startswith(NAME)]
    assert line.split()[3:] == ["-", "35.2", "-", "MIT", "-"]
    assert not home.exists()
    get(lightconv, server)
    out, _ = lightconv("released")
    (line,) = [line for line in out.splitlines() if line.startswith(NAME)]
    parameters = sum(p.numel() for n, p in world.models[MODEL.folder].named_parameters() if "conv_bias" not in n)
    size = f"{len(world.files[ARCHIVE]) / 1e6:,.1f}"
    assert line.split()[3:] == [f"{parameters:,}", "35.2", size, "MB", "MIT", "yes"]
    assert out.splitlines()[-1].startswith(f"cache: {home}, ")
    assert files_of(home) == sorted(COMPLETE)
    sha = hashlib.sha256(world.files[ARCHIVE]).hexdigest()
    assert json.loads((home / "files.json").read_text()) == {
        ARCHIVE: {"bytes": len(world.files[ARCHIVE]), "sha256": sha},
        MODEL.folder: {"parameters": parameters},
    }


def test_it_is_downloaded_once_and_exported_as_asked(server, home, lightconv):
    get(lightconv, server)
    get(lightconv, server)
    assert server.requests == [(ARCHIVE, 0)]
    exported = home / MODEL.folder / "exported"
    assert open_exported(exported).settings.weights == "float32"
    get(lightconv, server, "--dtype", "int8")
    assert open_exported(exported).settings.weights == "int8" and len(server.requests) == 1
    get(lightconv, server)
    assert open_exported(exported).settings.weights == "int8"
    _, err = lightconv("released", "--clear", NAME)
    assert "MB deleted" in err and files_of(home) == ["files.json"]
    lightconv("released", "--clear")
    assert not home.exists()


def test_an_exported_directory_that_is_missing_is_made_again(server, home, lightconv):
    get(lightconv, server)
    shutil.rmtree(home / MODEL.folder / "exported")
    get(lightconv, server)
    assert files_of(home) == sorted(COMPLETE) and server.requests == [(ARCHIVE, 0)]


def test_what_is_complete_needs_no_cache_that_can_be_written(server, home, lightconv, monkeypatch):
    """Such as another user's."""
    get(lightconv, server)
    test_set = fetch.get_test_set(MODEL, place=server.address)

    def read_only(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(fetch, "locked", read_only)
    out, _ = get(lightconv, server)
    assert out == f"{home / MODEL.folder}\n" and fetch.get_test_set(MODEL) == test_set
    refused(lightconv, server, "Permission denied", "--dtype", "int8")


def test_a_model_is_cleared_with_its_test_set_unless_another_one_needs_it(home, lightconv):
    """And with downloads that were interrupted."""
    other = MODELS["lightconv.no_glu.iwslt14.de-en"]
    assert other.test_folder == MODEL.test_folder
    model, test = f"{MODEL.folder}/model.pt", f"{MODEL.test_folder}/test.de-en.de.bin"
    parts = [f"downloads/{name}/archive.part" for name in (MODEL.folder, MODEL.test_folder, other.folder)]
    for name in (model, test, f"{other.folder}/model.pt", *parts):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x")
    left = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    for cleared, gone in ((MODEL, {model, parts[0]}), (other, {f"{other.folder}/model.pt", parts[2], test, parts[1]})):
        lightconv("released", "--clear", cleared.name)
        left -= gone
        assert {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()} == left


def fill(home):
    """What the cache may have, of models and of processes that were killed."""
    folders = (MODEL.folder, MODEL.test_folder, "downloads/x", f".{MODEL.folder}.7.0123abcd.tmp")
    for folder in folders:
        (home / folder).mkdir(parents=True)
        (home / folder / "file").write_text("x")
    (home / "files.json").write_text("{}")
    (home / ".files.json.7.0123abcd.tmp").write_text("{")


def test_a_cache_that_is_a_link_is_emptied(home, lightconv, tmp_path):
    fill(tmp_path / "disk")
    home.parent.mkdir(parents=True, exist_ok=True)
    home.symlink_to(tmp_path / "disk")
    _, err = lightconv("released", "--clear")
    assert home.is_symlink() and not list(home.iterdir()) and "left" not in err


def test_what_the_cache_has_of_the_users_own_stays_and_is_named(home, lightconv):
    fill(home)
    (home / "my-model").mkdir()
    (home / "notes.txt").write_text("mine")
    _, err = lightconv("released", "--clear")
    assert sorted(path.name for path in home.iterdir()) == ["my-model", "notes.txt"]
    assert f"left in {home}, not of a released model: my-model, notes.txt" in err


def test_an_empty_name_clears_nothing(home, lightconv):
    """As of a variable of the shell that is not set."""
    fill(home)
    _, err = lightconv("released", "", "--clear", status=2)
    assert err == "lightconv released: error: there is no released model '': lightconv released lists them\n"
    assert (home / MODEL.folder / "file").exists() and (home / "files.json").exists()


def test_a_model_that_is_linked_can_be_cleared_and_fetched_again(server, home, lightconv, tmp_path):
    get(lightconv, server)
    (home / MODEL.folder).rename(tmp_path / "disk")
    (home / MODEL.folder).symlink_to(tmp_path / "disk")
    lightconv("released", "--clear", NAME)
    assert not (tmp_path / "disk").exists() and not (home / MODEL.folder).is_symlink()
    get(lightconv, server)


def test_slow_cut_off_and_moved_downloads_are_resumed(server, home, lightconv):
    half = len(server.files[ARCHIVE]) // 2
    server.redirects[ARCHIVE] = f"{server.address}/moved/{ARCHIVE}"
    server.files[f"moved/{ARCHIVE}"] = server.files[ARCHIVE]
    server.cuts[f"moved/{ARCHIVE}"] = [half]
    server.slow[f"moved/{ARCHIVE}"] = 4 * half
    get(lightconv, server)
    assert server.requests[1::2] == [(f"moved/{ARCHIVE}", 0), (f"moved/{ARCHIVE}", half)]
    assert files_of(home) == sorted(COMPLETE)


def test_a_download_that_was_given_up_is_resumed_by_the_next(server, home, lightconv):
    server.cuts[ARCHIVE] = [500, *[0] * download.FAILURES]
    refused(lightconv, server, rf"cannot download .*{ARCHIVE} \(the connection was closed after 500 of .*: {BY_HAND}")
    assert files_of(home) == []
    server.requests.clear()
    get(lightconv, server)
    assert server.requests == [(ARCHIVE, 500)]


def test_without_a_network_one_line_says_what_to_fetch_and_where_to_put_it(home, lightconv, monkeypatch):
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    _, err = lightconv("released", NAME, status=2)
    assert f"cannot download {MODEL.archive} (" in err and err.rstrip().endswith(BY_HAND) and files_of(home) == []


def test_a_damaged_archive_is_not_kept(world, server, home, lightconv):
    server.files[ARCHIVE] = world.files[ARCHIVE][:-100]
    refused(lightconv, server, "cut short or damaged")
    assert files_of(home) == [] and list(home.rglob("*.part")) == []
    server.files[ARCHIVE] = world.files[ARCHIVE]
    get(lightconv, server)


def test_another_file_than_the_first_is_refused(world, server, home, lightconv, tmp_path):
    get(lightconv, server)
    lightconv("released", "--clear", NAME)
    server.files[ARCHIVE] = world.files["iwslt14.de-en.lightconv.tar.gz"]
    found, first = (hashlib.sha256(data).hexdigest() for data in (server.files[ARCHIVE], world.files[ARCHIVE]))
    refused(lightconv, server, f"{ARCHIVE} is not the expected file: its checksum is {found}, expected {first}$")
    (tmp_path / ARCHIVE).write_bytes(server.files[ARCHIVE])
    _, err = lightconv("released", NAME, "--file", tmp_path / ARCHIVE, status=2)
    assert f"its checksum is {found}, expected {first}" in err and files_of(home) == ["files.json"]


class Program:
    def __reduce__(self):
        return exec, ("raise SystemExit('run')",)


def pickled(content):
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (lambda: {"m/model.pt": b"x" * 5000}, "holds more than the 4,000 bytes expected"),
        (lambda: {"m/README": b"x"}, r"has 0 folders with \*\.pt, expected one"),
        (lambda: {"m/a.pt": b"x", "m/b.pt": b"x"}, "has several checkpoints: a.pt, b.pt"),
        (lambda: {"m/model.pt": pickled({"model": Program()})}, "refused: loading it would run"),
        (lambda: {"m/model.pt": b"x"}, rf"/{ARCHIVE}/model.pt was not written by torch.save"),
    ],
    ids=["bomb", "no-model", "two-models", "program", "no-checkpoint"],
)
def test_other_archives_are_refused_and_not_recorded(files, message, server, home, lightconv, monkeypatch):
    monkeypatch.setattr(fetch, "LARGEST", 4000)
    server.files[ARCHIVE] = tar_of(files())
    refused(lightconv, server, message)
    assert files_of(home) == []


def test_a_full_disk_leaves_the_download_for_the_next_time(server, home, lightconv, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "unpack", full)
        refused(lightconv, server, "No space left on device")
    assert files_of(home) == [f"downloads/{MODEL.folder}/{ARCHIVE}"]
    get(lightconv, server)
    assert server.requests == [(ARCHIVE, 0)] and files_of(home) == sorted(COMPLETE)


def test_two_processes_at_once_download_once(server, home):
    server.slow[ARCHIVE] = len(server.files[ARCHIVE])
    environment = script_environment(LIGHTCONV_HOME=str(home.parent), **LOCAL)
    command = [environment["LIGHTCONV_PYTHON"], "-m", "lightconv_plugin", "released", NAME, "--url", server.address]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=200)[0] for process in both] == [f"{home / MODEL.folder}\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
    assert server.requests == [(ARCHIVE, 0)] and files_of(home) == sorted(COMPLETE)


def test_talk_from_files_at_hand(world, home, lightconv, tmp_path):
    name = "talkconv.iwslt14.de-en"
    model = MODELS[name]
    (tmp_path / "talk.pt").write_bytes(world.checkpoints[name])
    (tmp_path / "test.tar.bz2").write_bytes(tar_of(world.tests[model.test_folder], "bz2"))
    _, err = lightconv("released", name, status=2)
    assert (
        f"its files are linked from {model.page}: fetch it by hand, then: lightconv released {model.name} --file FILE"
        in err
    )
    _, err = lightconv("released", name, "--file", tmp_path / "talk.pt", status=2)
    assert err.rstrip().endswith(
        f"talk.pt has no dictionaries, but the archive of the test set has them: lightconv released {name} "
        "--file talk.pt --test-file FILE"
    )
    _, err = lightconv("released", name, "--file", tmp_path / "talk.pt", "--test-file", tmp_path / "test.tar.bz2")
    assert "came without merges: its input must be split into subwords" in err
    exported = open_exported(cache.directory(name))
    assert (exported.search.num_beams, exported.search.length_penalty) == (5, 1.6)
    assert {mixer.kind for mixer in exported.config.decoder.mixers} == {"talk"}
    split = world.pieces[model.task.name]["de"]
    with Translator(name, dtype="float32") as translator:
        expected = [one.text for one in translator.translate(split, pieces=True)]
    assert any("@@" in line for line in split) and all(expected)
    (tmp_path / "in").write_text("\n".join([*split, ""]), encoding="utf-8")
    lightconv("translate", name, "--input", tmp_path / "in", "--output", tmp_path / "out", "--dtype", "float32")
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == expected
    lightconv("reproduce", f"released/{name}", "--results", tmp_path / "results")
    assert json.loads((tmp_path / f"results/released/{name}.json").read_text())["paper"] == "35.5"


def test_files_at_hand_of_two_models_may_have_the_same_name(world, home, lightconv, tmp_path):
    for name in ("talkconv.iwslt14.de-en", "talkconv.wmt16.en-de"):
        files = tmp_path / name / "model.pt", tmp_path / name / "test.tar.bz2"
        files[0].parent.mkdir()
        files[0].write_bytes(world.checkpoints[name])
        files[1].write_bytes(tar_of(world.tests[MODELS[name].test_folder], "bz2"))
        lightconv("released", name, "--file", files[0], "--test-file", files[1])
        assert open_exported(cache.directory(name)).settings.source_lang == MODELS[name].task.pair[0]
    files[0].write_bytes(world.checkpoints["talkconv.iwslt14.de-en"])
    _, err = lightconv("released", name, "--file", files[0], status=2)
    assert "model.pt is not the expected file: its checksum is" in err


def test_the_list_has_the_parameters_of_the_newest_file(world, home, lightconv, tmp_path):
    name = "talkconv.wmt16.en-de"
    (tmp_path / "test.tar.bz2").write_bytes(tar_of(world.tests[MODELS[name].test_folder], "bz2"))
    counts = []
    for file, kind in (("wrong.pt", MODELS["lightconv.no_glu.wmt16.en-de"].folder), ("right.pt", name)):
        (tmp_path / file).write_bytes(world.checkpoints[kind])
        lightconv("released", name, "--file", tmp_path / file, "--test-file", tmp_path / "test.tar.bz2")
        out, _ = lightconv("released")
        counts += [line.split()[3] for line in out.splitlines() if line.startswith(name)]
        assert counts[-1] == f"{count_parameters(cache.checkpoint(MODELS[name])):,}"
    assert counts[0] != counts[1]


def test_a_name_that_is_not_in_the_cache_says_what_to_run(home, lightconv, tmp_path):
    _, err = lightconv("translate", NAME, "--output", tmp_path / "out", status=2)
    assert err.rstrip().endswith(f"{NAME} is a released model that is not in the cache: run lightconv released {NAME}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dynamicconv.glu.wmt16.de-en"], "there is no released model dynamicconv.glu.wmt16.de-en: did you mean"),
        (["--dtype", "int8"], "--dtype needs the NAME of a model"),
        (["--clear", NAME, "--url", "x"], "--url is not valid with --clear"),
        ([NAME, "--file", "x", "--url", "y"], "give --file or --url, not both"),
        ([NAME, "--file", "/nowhere/x.tar.gz"], "--file: no such file: /nowhere/x.tar.gz"),
    ],
)
def test_wrong_arguments(arguments, message, home, lightconv):
    _, err = lightconv("released", *arguments, status=2)
    assert err.count("\n") == 1 and message in err


def test_a_damaged_table_is_one_line(home, lightconv):
    home.mkdir(parents=True)
    (home / "files.json").write_text("{")
    _, err = lightconv("released", status=2)
    assert "files.json is damaged: delete it, and later downloads are recorded anew" in err and err.count("\n") == 1
