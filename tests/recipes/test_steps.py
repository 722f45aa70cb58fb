"""A step is done once, again when something changed, and leaves nothing half-made."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes import steps as steps_module
from lightconv_plugin.recipes.data.stages import Plan, Stage
from lightconv_plugin.recipes.steps import Digests, Steps, digest


@pytest.fixture
def setting(tmp_path):
    """(run, calls): `run(**changes)` runs one step that joins two inputs into two outputs; `calls` counts the work."""
    calls = []
    inputs = [tmp_path / "a", tmp_path / "b"]
    for path in inputs:
        path.write_text(path.name)

    def make(first, second):
        calls.append(1)
        first.write_text("".join(path.read_text() for path in inputs))
        second.mkdir()
        (second / "inner").write_text("folder")

    def run(params=(1, 2), make=make):
        with Steps(tmp_path) as steps:
            outputs = [tmp_path / "out/one", tmp_path / "out/two"]
            return steps.run("join", "join", make, inputs=inputs, outputs=outputs, params={"p": params})

    return run, calls, tmp_path


def test_the_second_run_does_nothing(setting):
    run, calls, root = setting
    assert run() is True and run() is False
    assert len(calls) == 1
    assert (root / "out/one").read_text() == "ab" and (root / "out/two/inner").read_text() == "folder"


@pytest.mark.parametrize("change", ["input", "output", "output-in-folder", "output-removed", "params", "stamp"])
def test_any_change_runs_it_again(setting, change):
    run, calls, root = setting
    run()
    params = (1, 2)
    match change:
        case "input":
            (root / "a").write_text("c")
        case "output":
            (root / "out/one").write_text("tampered")
        case "output-in-folder":
            (root / "out/two/inner").write_text("tampered")
        case "output-removed":
            (root / "out/one").unlink()
        case "params":
            params = (1, 3)
        case "stamp":
            (root / ".steps/join.json").write_text("{cut sho")
    assert run(params) is True and run(params) is False
    assert len(calls) == 2
    assert (root / "out/one").read_text() == ("cb" if change == "input" else "ab")


def test_a_step_that_runs_again_leaves_those_whose_names_begin_like_its_own(tmp_path):
    with Steps(tmp_path) as steps:

        def run(name, params):
            return steps.run(name, name, lambda out: out.touch(), inputs=[], outputs=[tmp_path / name], params=params)

        assert run("text", {"a": 1}) and run("text-train", {}) and run("text", {"a": 2})
        assert not run("text-train", {})


def test_a_users_files_in_an_output_stay(setting):
    """A model or a note next to binarised data: no reason to run the step again, and kept when it is run again."""
    run, _, root = setting
    run()
    mine = root / "out/two/mine"
    (mine / "notes").mkdir(parents=True)
    (mine / "notes/a.txt").write_text("kept")
    (root / "out/two/link").symlink_to("nowhere")
    assert run() is False
    (root / "a").write_text("c")

    def make(first, second):
        second.mkdir()
        first.write_text("one")
        (second / "other").write_text("new")

    assert run(make=make) is True and run(make=make) is False
    assert (mine / "notes/a.txt").read_text() == "kept" and (root / "out/two/link").is_symlink()
    assert (root / "out/two/other").read_text() == "new"
    assert not (root / "out/two/inner").exists(), "the step's own files are replaced"
    assert not list(root.rglob("*.tmp"))
    (root / "out/two/other").write_text("tampered")
    assert run() is True and (mine / "notes/a.txt").exists()


def test_a_users_files_stay_in_a_folder_of_an_earlier_version(setting):
    """It has no record of the files; one is made when the step is found to be done."""
    run, _, root = setting
    run()
    (root / ".steps/files").unlink()
    assert run() is False
    (root / "out/two/mine").write_text("kept")
    assert run() is False and run((1, 3)) is True
    assert (root / "out/two/mine").read_text() == "kept"


@pytest.fixture
def linked(setting):
    """(run, root, disk): the outputs were moved to `disk` and linked."""
    run, _, root = setting
    run()
    disk = root / "disk"
    disk.mkdir()
    for name in ("one", "two"):
        (root / "out" / name).rename(disk / name)
        (root / "out" / name).symlink_to(disk / name)
    return run, root, disk


def test_a_folder_that_is_linked_is_replaced_where_it_is(linked):
    run, root, disk = linked
    assert run() is False
    (root / "a").write_text("c")
    (disk / "two/mine").write_text("kept")
    assert run() is True and run() is False
    assert (disk / "two/inner").read_text() == "folder" and (disk / "two/mine").read_text() == "kept"
    assert (root / "out/two").is_symlink()
    # A file may be the user's own, such as references: the link is replaced.
    assert (root / "out/one").read_text() == "cb" and (disk / "one").read_text() == "ab"
    assert sorted(path.name for path in disk.iterdir()) == ["one", "two"]


def test_an_output_of_another_preparation_is_not_replaced(linked):
    run, _, disk = linked
    (disk / ".steps").mkdir()
    with pytest.raises(CorpusError, match=r"out/two leads to .*disk/two, which is another preparation's"):
        run((1, 3), make=None)
    assert (disk / "two/inner").read_text() == "folder"


def test_a_folder_of_the_users_that_is_linked_keeps_its_files(linked):
    """Without a record nobody knows which files are the step's."""
    run, root, disk = linked
    (disk / "two/mine").write_text("kept")
    (root / ".steps/files").unlink()
    assert run((1, 3)) is True
    assert (disk / "two/mine").read_text() == "kept" and (disk / "two/inner").read_text() == "folder"


def test_an_output_on_a_mount_point_is_refused_before_the_work(linked, monkeypatch):
    run, _, disk = linked
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(disk / "two"))
    with pytest.raises(CorpusError, match="out/two is a mount point, which cannot be replaced"):
        run((1, 3), make=None)


def test_text_that_an_output_leads_to_is_not_replaced_by_what_is_made_of_it(tmp_path):
    (tmp_path / "text").write_text("mine")
    for name in (".steps", "raw"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out/raw/train").symlink_to(tmp_path / "text")
    stage = Stage("s", "s", None, inputs=[tmp_path / "text"], outputs=[tmp_path / "out/raw/train"])
    with pytest.raises(CorpusError, match="text would be replaced by what is made of it"):
        Plan(tmp_path / "out", [stage]).run()
    assert (tmp_path / "text").read_text() == "mine"


def test_a_kill_while_an_output_is_replaced_loses_nothing_of_the_user(setting, monkeypatch):
    run, _, root = setting
    run()
    (root / "out/two/mine").write_text("kept")
    replace = os.replace

    def killed(source, target):
        if str(target).endswith("out/two/inner"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        run((1, 3))
    assert run() is True and run() is False
    assert (root / "out/two/mine").read_text() == "kept" and (root / "out/two/inner").read_text() == "folder"


def test_a_failure_leaves_no_output_and_is_repeated(setting):
    run, _, root = setting

    def fail(first, second):
        first.write_text("half")
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        run(make=fail)
    assert not (root / "out").exists() or not list((root / "out").iterdir())
    assert run() is True
    assert not list((root / "out").glob("*.tmp"))


def test_names_that_are_not_utf_8(tmp_path):
    """Those of files and of folders may be any bytes."""
    text = tmp_path / os.fsdecode(b"caf\xe9")
    text.write_text("x")

    def make(out):
        out.mkdir()
        shutil.copy(text, out / text.name)

    for new in (True, False):
        with Steps(tmp_path / "root") as steps:
            out = tmp_path / "root" / text.name
            assert steps.run("s", "s", make, inputs=[text], outputs=[out], params={"text": str(text)}) is new


def test_the_folder_can_be_moved(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/in").write_text("x")
    calls = []

    def run(root):
        with Steps(root) as steps:

            def make(out):
                calls.append(1)
                out.write_text("y")

            steps.run("s", "s", make, inputs=[root / "in"], outputs=[root / "out"], params={})

    run(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    run(tmp_path / "new")
    assert len(calls) == 1


def _work(root, queue):
    with Steps(root) as steps:

        def make(out):
            queue.put("made")
            out.write_text("x")

        steps.run("s", "s", make, inputs=[], outputs=[root / "out"], params={})


def test_two_processes_do_the_work_once(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_work, args=(tmp_path, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert queue.get(timeout=5) == "made"
    assert queue.empty()


def test_what_a_killed_process_started_keeps_the_lock(tmp_path, capsys):
    """Such as fairseq-preprocess, which still writes: the next process waits until it has ended."""
    ready = tmp_path / "ready"
    if (child := os.fork()) == 0:
        with Steps(tmp_path):
            orphan = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(1)"
            subprocess.Popen([sys.executable, "-c", orphan], close_fds=False)
            signal.pause()
    while not ready.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    start = time.monotonic()
    with Steps(tmp_path):
        assert time.monotonic() - start > 0.3
    assert "waiting: another process is working in" in capsys.readouterr().err


def test_the_digest_of_a_folder_sees_names_and_contents(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f/a").write_text("1")
    first = digest(tmp_path / "f")
    (tmp_path / "f/a").rename(tmp_path / "f/b")
    renamed = digest(tmp_path / "f")
    (tmp_path / "f/b").write_text("2")
    assert len({first, renamed, digest(tmp_path / "f")}) == 3


@pytest.fixture
def large(tmp_path, monkeypatch):
    """(file, reads, digests): a file that counts as large and was written long ago; the reads of it so far."""
    monkeypatch.setattr(Digests, "LARGE", 10)
    file = tmp_path / "in/large"
    file.parent.mkdir()
    file.write_bytes(b"x" * 100)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10_000_000_000)
    reads = []
    monkeypatch.setattr(steps_module, "digest", lambda path, *of: reads.append(path) or digest(path, *of))
    return file, reads, lambda: Digests(tmp_path / "memory.json")


def test_a_large_file_is_read_once_by_many_runs(large):
    file, reads, digests = large
    expected, of_folder = digest(file), digest(file.parent)
    reads.clear()
    assert [digests()(file) for _ in range(3)] == [expected] * 3
    assert reads == [file]
    assert digests()(file.parent) == of_folder
    assert reads == [file, file.parent]  # the folder's listing; not the file again


@pytest.mark.parametrize("change", ["content", "content-with-the-old-time", "another-file", "memory"])
def test_a_changed_large_file_is_read_again(large, change, tmp_path):
    file, reads, digests = large
    digests()(file)
    old = file.stat()
    time.sleep(0.02)
    match change:
        case "content":
            file.write_bytes(b"y" * 100)
        case "content-with-the-old-time":
            file.write_bytes(b"y" * 100)
            os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
        case "another-file":
            (tmp_path / "new").write_bytes(b"y" * 100)
            os.utime(tmp_path / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
            (tmp_path / "new").replace(file)
        case "memory":
            (tmp_path / "memory.json").write_text("{cut sho")
    assert digests()(file) == digest(file)
    assert reads == [file, file]


def test_a_large_file_just_written_is_not_remembered(large, monkeypatch):
    file, reads, digests = large
    monkeypatch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns + 1_000_000)
    digests()(file)
    digests()(file)
    assert reads == [file, file]
