"""A machine that waits for one that stands still, or whose network is gone without a word, gives up in time."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

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


def watching(rendezvous, seconds):
    """(thread, event that it gave up)."""
    from lightconv_plugin.recipes.training.launch import watch

    gave_up = threading.Event()
    thread = threading.Thread(target=watch, args=(rendezvous, seconds, gave_up.set), daemon=True)
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


def test_a_host_that_never_comes_is_torchruns_matter():
    thread, gave_up = watching(f"localhost:{free_port()}", 1)
    thread.join(20)
    assert not thread.is_alive() and not gave_up.is_set()
