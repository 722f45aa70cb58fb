"""Two "machines" on this one for trainings by scripts/train.sh: each with a process tree that can be frozen or killed,
and a connection between them that can be cut.
"""

import contextlib
import os
import select
import signal
import socket
import threading
from pathlib import Path

from tests.recipes.training.trainings import Training


def tree(pid):
    """The process and everything that it has started, directly or not, as process numbers."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; the parent is the second field behind it.
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for number in found:
        found += children.get(number, [])
    return found


def signal_tree(training, number):
    """A signal to all processes of a training, as when its machine stops, comes back, or is switched off."""
    for pid in tree(training.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Machine(Training):
    """One of two machines that train together, each with one process; they print to files of their own."""

    def __init__(self, config, name, rank, port, *arguments):
        where = ("--nodes", "2", "--node-rank", str(rank), "--rendezvous", f"localhost:{port}", "--processes", "1")
        super().__init__(config, name, *where, *arguments, printed=f"{name}.{rank}.out")

    def kill(self):
        """Whatever is left of it."""
        signal_tree(self, signal.SIGKILL)
        self.process.wait()


class Proxy:
    """Hands every connection to its port on to another one of this machine, until `cut`."""

    def __init__(self, to):
        self.to = to
        self.listener = socket.create_server(("localhost", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                mine, _ = self.listener.accept()
            except OSError:  # closed by `cut`
                return
            try:
                other = socket.create_connection(("localhost", self.to), timeout=5)
            except OSError:  # nobody listens there yet: the caller tries again
                mine.close()
                continue
            other.settimeout(None)
            self.pairs.append((mine, other))
            threading.Thread(target=self._forward, args=(mine, other), daemon=True).start()

    def _forward(self, mine, other):
        with contextlib.suppress(OSError, ValueError):
            while True:
                for source in select.select([mine, other], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return self._close(mine, other)
                    (other if source is mine else mine).sendall(data)

    @staticmethod
    def _close(*ends):
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self):
        """Close every connection and take no more."""
        self._close(self.listener)
        for pair in self.pairs:
            self._close(*pair)
