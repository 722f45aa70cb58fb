"""Texts line by line, and the pool of processes that maps them."""

import gzip
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data import text_pool
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, map_file, write_lines
from tests import programs
from tests.recipes.conftest import ROOT


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "train.en"
    path.write_bytes("\ufeffone\u2028still one\r\ntwo\x85\n\nfour".encode())
    assert list(iter_lines(path)) == ["one\u2028still one", "two\x85", "", "four"]
    assert count_lines(path) == 4


@pytest.mark.parametrize("content, lines", [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\n\n", 2)])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_counting_agrees_with_reading(tmp_path, name, content, lines):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert count_lines(path) == len(list(iter_lines(path))) == lines
    assert map_file(_reverse, ("",), path, tmp_path / "out", "t", 2) == lines
    assert write_lines(tmp_path / "again", iter_lines(path)) == lines
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x", b"good\nbad \xff\n", "x is not UTF-8: line 2"),
        ("x.gz", b"no gzip at all", "cannot read .*x.gz"),
        ("x.gz", gzip.compress(b"cut short\n" * 100)[:-12], "cannot read .*x.gz"),
    ],
    ids=["encoding", "not-gzip", "cut-short"],
)
def test_broken_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(iter_lines(tmp_path / name))
    with pytest.raises(CorpusError, match=message):
        map_file(_reverse, ("",), tmp_path / name, tmp_path / "out", "t", 2)


def _reverse(suffix):
    return lambda line: line[::-1] + suffix


def _break(_):
    return lambda line: line.replace(" ", "\n")


def _kill(_):
    def work(line):
        os.kill(os.getpid(), signal.SIGKILL)

    return work


@pytest.fixture
def blocks(monkeypatch):
    """Small blocks, so that small texts have many."""
    monkeypatch.setattr(text_pool, "BLOCK", 1000)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_lines_keep_their_order_over_blocks_and_processes(tmp_path, blocks, name, workers):
    lines = [f"{'é' * (i % 70)} line {i}" for i in range(3000)] + ["", "x" * 5000, "last"]
    text = "\r\n".join(lines[:10]) + "\r\n" + "\n".join(lines[10:])
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert map_file(_reverse, ("!",), tmp_path / name, tmp_path / "out", "t", workers) == len(lines)
    assert list(iter_lines(tmp_path / "out")) == [line[::-1] + "!" for line in lines]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_by_its_number_in_the_text(tmp_path, blocks, workers):
    lines = [f"line {i}".encode() for i in range(1, 2001)]
    lines[1233] = b"bad \xff"
    (tmp_path / "x").write_bytes(b"\n".join(lines))
    with pytest.raises(CorpusError, match="x is not UTF-8: line 1234: "):
        map_file(_reverse, ("",), tmp_path / "x", tmp_path / "out", "t", workers)


def test_one_line_stays_one_line(tmp_path):
    (tmp_path / "x").write_text("a b\n")
    with pytest.raises(ValueError, match="one line became several"):
        map_file(_break, (0,), tmp_path / "x", tmp_path / "out", "t", 1)


def test_a_process_that_is_killed_is_an_error_and_no_wait_for_ever(tmp_path, blocks):
    (tmp_path / "x").write_text("a line\n" * 1000)
    with pytest.raises(CorpusError, match=r"worked on .*x was killed, perhaps for lack of memory: try fewer `workers`"):
        map_file(_kill, (0,), tmp_path / "x", tmp_path / "out", "t", 2)


def _refuse(_):
    raise CorpusError("not this language")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_wrong_with_the_factory_is_said(tmp_path, blocks, workers):
    (tmp_path / "x").write_text("a line\n" * 1000)
    with pytest.raises(CorpusError, match="not this language"):
        map_file(_refuse, (0,), tmp_path / "x", tmp_path / "out", "t", workers)


SLOW = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    from lightconv_plugin.recipes.data import text_pool
    from pathlib import Path
    text_pool.BLOCK = 100
    def slow(folder):
        Path(folder, str(os.getpid())).touch()
        return lambda line: time.sleep(0.05) or line
    text_pool.map_file(slow, ({folder!r},), Path({source!r}), Path({source!r} + ".out"), "t", 2)
"""


FORKS = {
    "called": "processes.called(print, [()]).__enter__()",
    "map_file": "text_pool.map_file(lambda: str, (), Path({source!r}), Path({source!r} + '.out'), 't', 2)",
}
INTERRUPTED = """
    import os, signal, sys
    sys.path.insert(0, {root!r})
    from lightconv_plugin import processes
    from lightconv_plugin.recipes.data import text_pool
    from pathlib import Path
    text_pool.BLOCK = 100
    def ended(*_):
        raise KeyboardInterrupt
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
        signal.signal(number, ended)
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {signal}))
    try:
        {call}
    except KeyboardInterrupt:
        sys.exit(77)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", FORKS)
def test_ctrl_c_while_a_process_is_forked_is_not_lost(name, number, tmp_path):
    """What a hook of the fork raises, Python only prints; logging has such a hook."""
    source = tmp_path / "x"
    source.write_text("a line\n" * 1000)
    call = FORKS[name].format(source=str(source))
    code = textwrap.dedent(INTERRUPTED).format(root=str(ROOT), signal=int(number), call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 77 and "ignored" not in done.stderr, done.stderr


def test_the_pool_ends_with_its_parent_however_that_ends(tmp_path):
    (tmp_path / "pids").mkdir()
    (tmp_path / "x").write_text("a line\n" * 1000)
    code = SLOW.format(root=str(ROOT), folder=str(tmp_path / "pids"), source=str(tmp_path / "x"))
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL) as parent:
        programs.wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
        parent.kill()
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    programs.wait_until(lambda: not any(map(programs.is_running, pids)))


MEMORY = """
    import resource, sys
    sys.path.insert(0, {root!r})
    from lightconv_plugin.recipes.data import text_pool
    from pathlib import Path
    def same():
        return str
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(text_pool.map_file(same, (), Path({source!r}), Path({source!r} + ".out"), "t", 2))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_text(tmp_path):
    """200 MB of text through two processes: less than 60 MB more in the parent."""
    with (tmp_path / "x").open("w") as file:
        for _ in range(200):
            file.write("a line of twenty by.\n" * 50_000)
    code = MEMORY.format(root=str(ROOT), source=str(tmp_path / "x"))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    lines, kib = map(int, done.stdout.split())
    assert lines == 10_000_000
    assert kib < 60_000
