"""Work in other processes: its results, its failures, and that none of the processes stays."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from tqdm import tqdm

from lightconv_plugin.errors import InputError
from lightconv_plugin.processes import called, map_unordered, module_command
from lightconv_plugin.progress import progress
from tests import process_work as work
from tests import programs
from tests.fairseq_cli import REPOSITORY


def one(function, *arguments):
    with called(function, [arguments]) as (result,):
        return result()


def test_each_item_is_mapped_once():
    results = list(map_unordered(work.double, [(0,), (100,)], range(20)))
    assert sorted(result % 100 for result in results) == list(range(0, 40, 2))
    assert not multiprocessing.active_children()


def test_a_process_with_nothing_left_to_do_ends_by_itself(tmp_path):
    """So that it cleans up after itself."""
    files = [tmp_path / "one", tmp_path / "two"]
    assert sorted(map_unordered(work.says_goodbye, [(file,) for file in files], range(4))) == [0, 2, 4, 6]
    assert all(file.exists() for file in files)


def test_ctrl_c_does_not_reach_a_process_that_is_starting():
    """It would say what it was importing."""
    assert list(map_unordered(work.blocked_at_first, [()], [signal.SIGINT])) == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("factory", "error", "said"),
    [
        (work.fails, ValueError, "the model is gone"),
        (work.fails_unusually, RuntimeError, r"Unusual\('line 3, column 4'\)"),
        (work.dies, InputError, "ended with status -9 before .*, perhaps for lack of memory: try fewer `workers`"),
        (work.returns_what_cannot_be_sent, Exception, "pickle"),
    ],
)
def test_a_failure_is_raised_and_ends_the_others(factory, error, said):
    with pytest.raises(error, match=said):
        list(map_unordered(factory, [(0,), (1,)], range(10**9)))
    assert not multiprocessing.active_children()


def test_a_call_in_each_process():
    with called(work.add, [(1, 2), (30, 40)]) as (first, second):
        assert (second(), first()) == (70, 3)
    assert one(work.pid) != os.getpid()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", [InputError, OSError, ZeroDivisionError])
def test_what_a_call_raises_is_raised(kind):
    with pytest.raises(kind, match="that is wrong") as raised:
        one(work.fail, kind, "that is wrong")
    assert "raise kind(text)" in str(raised.value.__cause__)  # its traceback


def test_what_cannot_be_unpickled_is_still_said():
    with pytest.raises(RuntimeError, match="line 3, column 4") as raised:
        one(work.raise_unusual)
    assert "raise Unusual(3, 4)" in str(raised.value.__cause__)


def test_a_call_whose_process_is_killed():
    wanted = pytest.raises(InputError, match=r"ended with status -9 before .*, perhaps for lack of memory: try less")
    with wanted, called(work.kill_this_process, [()], ": try less") as (result,):
        result()
    assert not multiprocessing.active_children()


def test_memory_is_not_blamed_for_a_process_that_ended_by_itself():
    with pytest.raises(InputError, match=r"^a process ended with status 3 before its work was done$"):
        one(work.end_this_process)


def test_a_call_whose_process_is_killed_while_it_answers():
    with called(work.is_killed_while_it_answers, [()], ": try less") as (result,):
        multiprocessing.active_children()[0].join()
        with pytest.raises(InputError, match=r"ended with status -9 before .*: try less"):
            result()


def write_a_bar():
    with progress(total=1) as bar:
        bar.update()


def test_bars_of_other_threads_do_not_stop_it():
    """The process is forked while another thread, such as tqdm's own, holds the lock of all bars."""
    held, free = threading.Event(), threading.Event()

    def hold():
        with tqdm.get_lock():
            held.set()
            free.wait()

    def interrupt(*_):
        raise TimeoutError

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        one(write_a_bar)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        free.set()
        holding.join()


def test_ctrl_c_ends_it(tmp_path):
    """The process ignores the signal, which the terminal sends to it too; its parent kills it."""
    path = tmp_path / "pid"

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            one(work.write_pid_and_wait, path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_a_module_is_run_with_the_path_of_this_process(tmp_path, monkeypatch):
    """And not with the working directory's files, except where this process, too, looks for modules there."""
    own, here = tmp_path / "it's \\own", tmp_path / "here"
    for file in (own / "program.py", *(here / name for name in ("random.py", "runpy.py", "program.py"))):
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise SystemExit('of the working directory')")
    (own / "program.py").write_text("import random, sys; print(__name__, sys.path, sys.argv[1:])")
    for first in (str(own), ""):
        monkeypatch.chdir(own)
        monkeypatch.setattr(sys, "path", [first, *filter(None, sys.path)])
        command = [*module_command("program"), "-m", "two words"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"__main__ {[str(own), *sys.path[1:]]} ['-m', 'two words']\n", "")


PARENT = """
    import pathlib, sys
    from lightconv_plugin.processes import called
    from tests import process_work
    with called(process_work.write_pid_and_wait, [(pathlib.Path(path),) for path in sys.argv[1:]]) as results:
        results[0]()
"""


def test_the_processes_end_with_a_parent_that_is_killed(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(PARENT), *paths]
    with subprocess.Popen(command, env=environment) as parent:
        programs.wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
        parent.kill()
    pids = [int(path.read_text()) for path in paths]
    programs.wait_until(lambda: not any(map(programs.is_running, pids)))
