"""A machine that waits for one that stands still, or whose network is gone without a word, gives up in time.

And what else its processes do before they train, and when they are done.
"""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from lightconv_plugin.recipes.training import launch as launching
from lightconv_plugin.recipes.training.launch import LaunchJob, hangup_as_before, watch
from lightconv_plugin.recipes.training.plan import Plan
from lightconv_plugin.recipes.training.worker import GAVE_UP, check_same_number, limit_waiting
from tests import ROOT, programs
from tests.robustness.machines import free_port

# Hosts are not forked from this process, where threads of other tests may hold locks.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed"])


def _meet(port, ready):
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    ready.set()
    time.sleep(600)
    del store


@pytest.fixture
def host():
    """(process, HOST:PORT) of a machine where machines meet."""
    port, ready = free_port(), SERVER.Event()
    process = SERVER.Process(target=_meet, args=(port, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process, f"localhost:{port}"
    process.kill()
    process.join()


def watching(rendezvous, seconds, over=None):
    """(thread, event that it gave up)."""
    gave_up = threading.Event()
    arguments = (rendezvous, seconds, gave_up.set, over or threading.Event())
    thread = threading.Thread(target=watch, args=arguments, daemon=True)
    thread.start()
    return thread, gave_up


def test_a_host_that_stands_still_is_given_up(host):
    process, rendezvous = host
    _, gave_up = watching(rendezvous, 1)
    assert not gave_up.wait(1.2)  # it answers
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert gave_up.wait(30) and time.monotonic() - began > 0.7


def test_a_host_that_stands_still_for_less_is_not(host):
    process, rendezvous = host
    _, gave_up = watching(rendezvous, 3)
    assert not gave_up.wait(0.5)
    os.kill(process.pid, signal.SIGSTOP)
    assert not gave_up.wait(0.5)
    os.kill(process.pid, signal.SIGCONT)
    assert not gave_up.wait(3)


def test_a_host_that_ends_is_torchruns_matter(host):
    process, rendezvous = host
    thread, gave_up = watching(rendezvous, 5)
    assert not gave_up.wait(1)
    process.kill()
    thread.join(10)
    assert not thread.is_alive() and not gave_up.is_set()


def test_nothing_is_watched_when_the_training_is_over(host):
    before = threading.active_count()
    over = threading.Event()
    thread, gave_up = watching(host[1], 100, over)
    assert not gave_up.wait(1)
    over.set()
    thread.join(5)
    assert threading.active_count() == before and not gave_up.is_set()


@pytest.mark.parametrize("before, ends", [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_the_end_of_the_terminal_ends_a_training_but_under_nohup(before, ends):
    from torch.distributed.elastic.multiprocessing import SignalException, api

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, before)
    try:
        with hangup_as_before():
            for number in handlers:  # as torchrun does when it starts processes
                signal.signal(number, api._terminate_process_handler)
            with pytest.raises(SignalException) if ends else contextlib.nullcontext():
                os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SignalException):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_all_process_groups_wait_as_long_as_they_are_told(monkeypatch):
    def given(*arguments, **options):
        return arguments, options

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, given)
    limit_waiting(7)
    limit = {"timeout": timedelta(seconds=7)}
    assert dist.init_process_group("gloo", rank=1) == (("gloo",), {"rank": 1, **limit})
    assert dist.new_group([0, 1]) == (([0, 1],), limit)


def test_all_machines_must_run_equally_many_processes(monkeypatch, capsys):
    for name, number in {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12"}.items():
        monkeypatch.setenv(name, number)
    with pytest.raises(SystemExit) as left:
        check_same_number()
    said = "error: 2 machines have 12 processes, this one 8: all need the same number"
    assert (left.value.code, capsys.readouterr().err) == (1, f"lightconv train: {said}\n")
    monkeypatch.setenv("WORLD_SIZE", "16")
    check_same_number()
    assert capsys.readouterr() == ("", "")


LEAVING = """
import atexit, threading, time
import torch
from lightconv_plugin.recipes.training.worker import leave

def read_ahead():
    x = torch.zeros(1000)
    while True:
        torch.cat([x[:500], x[500:]]).sum()

for _ in range(2):
    threading.Thread(target=read_ahead, daemon=True).start()
time.sleep(0.1)
atexit.register(print, "at exit")
print("end", end=" ")
leave()
"""


def test_a_process_that_is_done_is_not_aborted_for_what_its_threads_do():
    """As fairseq's, which reads the next batches; Python's own end would abort it nearly always."""
    assert programs.run(sys.executable, "-c", LEAVING).stdout == "end at exit\n"


LOGGING = """
import os, sys
from pathlib import Path
from lightconv_plugin.recipes.training.worker import log_to

tee = log_to(Path(sys.argv[1]))
print("before", flush=True)
sys.stdin.read()
for line in ("after", "at the end"):
    print(line, flush=True)
os.close(1)
os.close(2)
os._exit(tee.wait())
"""


def test_the_log_goes_on_when_the_reader_of_the_output_leaves(tmp_path):
    arguments = [sys.executable, "-c", LOGGING, tmp_path / "train.log"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"before\n"
        process.stdout.close()
        process.stdin.close()
    assert process.returncode == 0
    assert (tmp_path / "train.log").read_text() == "before\nafter\nat the end\n"


def test_a_log_that_could_not_be_written_is_named(monkeypatch, capfd):
    monkeypatch.setattr(launching, "run_torchrun", lambda job, starts: (os.write(1, b"loss\n") - 5, ""))
    full = Path("/dev/full")
    assert launching.launch(LaunchJob(Path("a.yaml"), None, full, 1, 0, "", 0, 60)) == 0
    out, err = capfd.readouterr()
    assert out == "loss\n"
    said = "standard output or the log /dev/full lacks lines, see above: tee ended with status 1"
    assert f"lightconv train: warning: {said}\n" in err


def test_what_a_restart_needs_is_kept_from_the_cleaning_of_old_temporary_files(monkeypatch, tmp_path):
    """systemd-tmpfiles takes the lock of a folder before it removes what is old in it."""

    def torchrun(job, starts):
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(starts.parent, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 0, ""

    monkeypatch.setattr(launching, "run_torchrun", torchrun)
    assert launching.launch(LaunchJob(Path("a.yaml"), None, tmp_path / "log", 1, 0, "", 0, 60)) == 0


def test_torchrun_leaves_nothing_among_the_temporary_files(monkeypatch, tmp_path):
    """Its own folder for the output of the processes, which goes to the log, stays for ever."""
    starts = tmp_path / "train.a/starts"
    starts.parent.mkdir()
    starts.write_text(f"{GAVE_UP}this is a test")
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    job = LaunchJob(Path("a.yaml"), Plan(tmp_path, 1, True, ()), tmp_path / "log", 1, 0, "", 1, 60)
    status, said = launching.run_torchrun(job, starts)
    assert (status, said) == (1, "error: a process died (see above); not restarted, since this is a test")
    assert [path.name for path in tmp_path.iterdir()] == ["train.a"]


def test_a_host_that_never_comes_is_torchruns_matter():
    thread, gave_up = watching(f"localhost:{free_port()}", 1)
    thread.join(20)
    assert not thread.is_alive() and not gave_up.is_set()
