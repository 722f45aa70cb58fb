"""The command itself: its start, its ways out, and what the sub-commands share."""

import contextlib
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import lightconv_plugin
from lightconv_plugin.cli import doctor, main, user_dir
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write, check_new_file, read_lines
from tests import programs
from tests.warm_python import warm_python

COMMANDS = [name for commands in main.COMMANDS.values() for name in commands]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["user-dir"], *([name, "--help"] for name in COMMANDS)],
    ids=" ".join,
)
def test_what_needs_no_library_imports_none(arguments):
    done = programs.run(sys.executable, "-X", "importtime", "-m", "lightconv_plugin", *arguments)
    modules = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "lightconv_plugin.cli.main" in modules
    assert not modules & {"torch", "numpy", "fairseq", "sacrebleu", "sacremoses"}


def test_the_help_of_tune_names_the_defaults_of_generation():
    pytest.importorskip("fairseq")
    from lightconv_plugin.generation.fairseq_generate import DEFAULTS

    assert " ".join(DEFAULTS) in main.subparser("tune").description


def test_help_names_every_command_on_one_screen(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
    listed = [line[10:].split()[0] for line in lines if line[10:11].strip() and line[9:10] == " "]
    assert [name for name in listed if name in COMMANDS] == COMMANDS
    groups = [line.split()[0] for line in lines if line[:1].strip() and line[9:10] == " "]
    assert [name for name in groups if name in main.COMMANDS] == list(main.COMMANDS)


def test_every_command_is_a_module_that_defines_it():
    """With the name of the table, `run` and the example or description that its help shows."""
    for name in COMMANDS:
        parser = main.subparser(name)
        assert parser.prog == f"lightconv {name}" and parser.description and parser.get_default("run")


@pytest.mark.parametrize("name", ["average", "tune", "score", "translate", "convert"])
def test_the_help_of_a_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"lightconv {name} " in capsys.readouterr().out.split("example:")[1]


def test_user_dir_is_the_package_that_is_imported(capsys):
    assert main.main(["user-dir"]) == 0
    printed = Path(capsys.readouterr().out.removesuffix("\n"))
    assert printed.is_absolute()
    assert printed.samefile(Path(lightconv_plugin.__file__).parent)
    assert str(printed) in map(os.path.abspath, lightconv_plugin.__path__)


def test_the_installed_script_and_python_m_are_the_same_function(repository):
    assert 'lightconv = "lightconv_plugin.cli.main:main"' in (repository / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"lightconv {lightconv_plugin.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["average"]], ids=["none", "unknown", "no-options"])
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 2
    assert "usage: lightconv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("scroe", "did you mean score?"), ("user_dir", "did you mean user-dir?"), ("xyz", "lightconv --help lists")],
)
def test_an_unknown_command_suggests_the_nearest(name, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main([name, "--help"])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"lightconv: error: there is no command {name!r}: ") and said in last


@pytest.mark.parametrize(
    ("error", "package", "extra"),
    [
        (ModuleNotFoundError("", name="sacrebleu.metrics"), "sacrebleu", "recipes"),
        (ModuleNotFoundError("", name="matplotlib"), "matplotlib", "report"),
        (ModuleNotFoundError("", name="fairseq"), "fairseq", "fairseq"),
        (PackageNotFoundError("subword-nmt"), "subword-nmt", "text"),  # asked for its version
    ],
)
def test_a_missing_package_names_its_extra(error, package, extra, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(user_dir, "run", fail)
    assert main.main(["user-dir"]) == 2
    said = f"{package} is not installed: pip install '.[{extra}]' in a checkout of lightconv-plugin"
    assert capsys.readouterr().err == f"lightconv user-dir: error: {said}\n"


def test_parameters_become_the_options_of_the_command(monkeypatch, refusal):
    """What libraries write in backquotes; what is none of the command's parameters stays."""

    def fail(args):
        raise InputError("`json` and `other_thing` in `a file`")

    monkeypatch.setattr(doctor, "run", fail)
    assert refusal("doctor") == "lightconv doctor: error: --json and `other_thing` in `a file`\n"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (InputError("first line\n  second line"), 2, "lightconv user-dir: error: first line second line\n"),
        (PermissionError(13, "Permission denied", "x.pt"), 2, "lightconv user-dir: error: [Errno 13]"),
        (KeyboardInterrupt(), 130, "lightconv user-dir: interrupted\n"),
    ],
    ids=["command-error", "os-error", "ctrl-c"],
)
def test_an_error_is_one_line_and_a_status(error, status, said, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(user_dir, "run", fail)
    assert main.main(["user-dir"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1


@pytest.mark.parametrize("output", [None, "scores", "/dev/stdout"])
def test_nothing_is_said_when_the_reader_has_gone(output, repository, tmp_path):
    """`lightconv score … | head -0`"""
    (tmp_path / "text").write_text("a b c d\n", encoding="utf-8")
    options = ["--sys", "text", "--ref", "text", "--detok", "none", *(["--output", output] if output else [])]
    reader, writer = os.pipe()
    os.close(reader)
    command = [warm_python(), "-m", "lightconv_plugin", "score", *options]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_pipe_that_is_not_read_is_an_error():
    """Not the end of what `lightconv … | head` asked for: what is on standard output is whole."""
    script = """
import os, sys
from lightconv_plugin.cli import main, user_dir

def run(args):
    print("printed")
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

user_dir.run = run
sys.exit(main.main(["user-dir"]))
"""
    done = programs.run(warm_python(), "-c", script, status=2)
    assert done.stdout == "printed\n"
    assert done.stderr == "lightconv user-dir: error: [Errno 32] Broken pipe\n"


def test_closed_streams(tmp_path):
    """Of a process that was started without them: messages are lost, files are written."""
    (tmp_path / "text").write_text("a b c d\n")
    score = ["-m", "lightconv_plugin", "score", "--sys", "text", "--ref", "text", "--detok", "none", "--output", "out"]
    for closed in ("2>&-", ">&-"):
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", warm_python(), *score, "--force"]
        assert programs.run(*words, cwd=tmp_path).stderr == "" and "BLEU" in (tmp_path / "out").read_text()
        (tmp_path / "out").unlink()


def test_messages_without_a_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main.main(["average", "--inputs", "/no/where", "--output", "x.pt"]) == 2
    assert sys.stderr is not None and capsys.readouterr().out == ""


def test_what_the_terminal_cannot_show_is_escaped(tmp_path):
    (tmp_path / "text").write_text("a b c d\n", encoding="utf-8")
    options = ["--sys", tmp_path / "text", "--ref", tmp_path / "text", "--against", tmp_path / "text"]
    command = [sys.executable, "-m", "lightconv_plugin", "score", *options, "--detok", "none"]
    done = programs.run(*command, PYTHONIOENCODING="ascii")
    assert r"100.00 \xb1 0.00" in done.stdout


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), ModuleNotFoundError("No module named 'x'", name="x")])
def test_an_unforeseen_error_is_not_hidden(bug, monkeypatch):
    def fail(args):
        raise bug

    monkeypatch.setattr(user_dir, "run", fail)
    with pytest.raises(type(bug), match=str(bug)):
        main.main(["user-dir"])


def test_a_termination_cleans_up(monkeypatch, tmp_path):
    target, seen = tmp_path / "out.txt", []

    def half_way(args):
        with atomic_write(target) as file:
            file.write("half")
            seen.extend(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(user_dir, "run", half_way)
    with pytest.raises(SystemExit) as stopped:
        main.main(["user-dir"])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ atomic_write


@pytest.mark.parametrize("error", [None, InputError("wrong"), ZeroDivisionError])
def test_pythons_search_for_garbage_is_rare_only_within_a_command(error, monkeypatch):
    during = []

    def run(args):
        during.append(gc.get_threshold())
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(user_dir, "run", run)
    before = gc.get_threshold()
    with contextlib.suppress(ZeroDivisionError):
        main.main(["user-dir"])
    assert during == [(50_000, *before[1:])] and gc.get_threshold() == before


def test_atomic_write_text_and_bytes(tmp_path):
    with atomic_write(tmp_path / "text") as file:
        file.write("grün\n")
    with atomic_write(tmp_path / "bytes", binary=True) as file:
        file.write(b"\0\r\n")
    assert (tmp_path / "text").read_bytes() == "grün\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\0\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "text"]


def test_atomic_write_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    with atomic_write(tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_atomic_write_keeps_the_permissions_of_a_file(tmp_path):
    """And its owner and group, as far as the user may give them."""
    path = tmp_path / "private"
    path.touch()
    path.chmod(0o640)
    with contextlib.suppress(OSError):  # only root may, and not in every container
        os.chown(path, 1234, 5678)
    old = path.stat()
    with atomic_write(path) as file:
        assert os.fstat(file.fileno()).st_mode == old.st_mode, "also before it is complete"
        file.write("new")
    new = path.stat()
    assert (new.st_mode, new.st_uid, new.st_gid) == (old.st_mode, old.st_uid, old.st_gid) and new.st_ino != old.st_ino


def test_atomic_write_shows_the_old_content_until_the_end(tmp_path):
    path = tmp_path / "with a space"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_atomic_write_follows_links(tmp_path):
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder/target"
    link.symlink_to("folder/target")
    for content in ("made", "replaced"):
        with atomic_write(link) as file:
            file.write(content)
        assert link.is_symlink() and target.read_text() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "target"]


@pytest.mark.parametrize("binary", [False, True])
def test_atomic_write_does_not_replace_what_is_no_file(binary, tmp_path):
    """/dev/null, /dev/stdout or a named pipe are written to as they are."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_write(pipe, binary=binary) as file:
            file.write(b"text" if binary else "text")
        assert os.read(reader, 9) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/dev/stdout", "/dev/stderr"])
def test_atomic_write_goes_on_in_a_file_that_is_open(name, tmp_path):
    """`lightconv … --output /dev/stdout >>log` loses nothing of the log, although it is a regular file."""
    standard = {"/dev/stdout": 1, "/dev/stderr": 2}.get(name)
    with (tmp_path / "log").open("wb", buffering=0) as log:
        path, before = Path(name.format(log.fileno())), standard and os.dup(standard)
        try:
            if standard:
                os.dup2(log.fileno(), standard)
            log.write(b"before\n")
            check_new_file(path, force=False)
            with atomic_write(path) as file:
                file.write("text\n")
            log.write(b"after\n")
        finally:
            if standard:
                os.dup2(before, standard)
                os.close(before)
    assert (tmp_path / "log").read_text() == "before\ntext\nafter\n"
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


def test_a_descriptor_that_is_not_open_is_refused():
    with pytest.raises(InputError, match="cannot write /dev/fd/987: it is not open"):
        check_new_file(Path("/dev/fd/987"), force=False)


def test_lines_are_read_from_pipes_too(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    if (child := os.fork()) == 0:
        pipe.write_text("a\nb\n")
        os._exit(0)
    assert read_lines(pipe) == ["a", "b"]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit], ids=lambda e: e.__name__)
def test_atomic_write_leaves_nothing_of_a_failure(error, tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_leaves_nothing_when_the_renaming_fails(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"), atomic_write(tmp_path / "file") as file:
        file.write("all of it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, said", [("", "is a folder"), ("no/such", "there is no folder")], ids=["folder", "parent"]
)
def test_atomic_write_says_where_it_cannot_write(name, said, tmp_path):
    with pytest.raises(InputError, match=said), atomic_write(tmp_path / name):
        pytest.fail("must not begin")
    assert list(tmp_path.iterdir()) == []


def test_atomic_write_removes_what_a_killed_process_has_left(tmp_path):
    """Of the same file only, and not what is still being written, here or on another machine (which holds a lock)."""
    for name in ("file", "other"):
        if (child := os.fork()) == 0:
            with atomic_write(tmp_path / name):
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = {path.name.split(".")[1]: path for path in tmp_path.iterdir()}
    assert left.keys() == {"file", "other"}
    elsewhere = tmp_path / left["file"].name.replace(".tmp", "").replace(left["file"].name[-12:-4], "00000000.tmp")
    with elsewhere.open("w") as locked, atomic_write(tmp_path / "third") as third:
        fcntl.flock(locked, fcntl.LOCK_EX)
        for name in ("file", "third"):
            with atomic_write(tmp_path / name) as file:
                file.write("new")
        assert elsewhere.exists() and not left["file"].exists() and left["other"].exists()
        third.write("of a living process")
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "third").read_text() == "of a living process"
