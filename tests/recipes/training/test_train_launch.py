"""A machine that waits for one that stands still, or whose network is gone without a word, gives up in time."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import ROOT
from tests.robustness.machines import free_port

HOST = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def host():
    """(process, HOST:PORT) of a machine where machines meet."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", HOST, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process, f"localhost:{port}"
    process.kill()
    process.wait()
    process.stdout.close()


def watching(rendezvous, seconds, over=None):
    """(thread, event that it gave up)."""
    from lightconv_plugin.recipes.training.launch import watch

    gave_up = threading.Event()
    arguments = (rendezvous, seconds, gave_up.set, over or threading.Event())
    thread = threading.Thread(target=watch, args=arguments, daemon=True)
    thread.start()
    return thread, gave_up


def test_a_host_that_stands_still_is_given_up(host):
    process, rendezvous = host
    _, gave_up = watching(rendezvous, 2)
    assert not gave_up.wait(2)  # it answers
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert gave_up.wait(30) and time.monotonic() - began > 1.5


def test_a_host_that_stands_still_for_less_is_not(host):
    process, rendezvous = host
    _, gave_up = watching(rendezvous, 4)
    assert not gave_up.wait(1)
    os.kill(process.pid, signal.SIGSTOP)
    assert not gave_up.wait(1)
    os.kill(process.pid, signal.SIGCONT)
    assert not gave_up.wait(4)


def test_a_host_that_ends_is_torchruns_matter(host):
    process, rendezvous = host
    thread, gave_up = watching(rendezvous, 5)
    assert not gave_up.wait(2)
    process.kill()
    thread.join(10)
    assert not thread.is_alive() and not gave_up.is_set()


def test_nothing_is_watched_when_the_training_is_over(host):
    before = threading.active_count()
    over = threading.Event()
    thread, gave_up = watching(host[1], 100, over)
    assert not gave_up.wait(2)
    over.set()
    thread.join(5)
    assert threading.active_count() == before and not gave_up.is_set()


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
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "end at exit\n"), done.stderr


def test_a_host_that_never_comes_is_torchruns_matter():
    thread, gave_up = watching(f"localhost:{free_port()}", 1)
    thread.join(20)
    assert not thread.is_alive() and not gave_up.is_set()
