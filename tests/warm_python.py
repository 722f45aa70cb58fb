"""A Python interpreter that has torch and fairseq imported before it starts: most of what a small command takes.

`warm_python()` is the path of a program that is called as `python` is. It (warm_client.py) sends its arguments,
environment, working directory and open files to a server, which has imported all that and forks a process that runs
them; it passes signals on to that process, and ends as it ends. The process knows the program as `sys.executable`: what
it starts is as warm.

Where a process itself is tested (what a fresh one imports, who is in whose process group, what is left in /proc),
`sys.executable` is the one to call.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable  # which tests may replace by what warm_python gives
CLIENT = Path(__file__).with_name("warm_client.py")


@functools.cache
def warm_python(preloaded: str = "tests.fairseq_imported") -> str:
    """The program, whose server has imported the module `preloaded`; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm.")
    program = os.path.join(folder, "python")
    with open(program, "w") as file:
        # Without `site`, whose imports take longer than the client's work.
        file.write(f'#!/bin/sh\nexec {PYTHON!r} -S -E {str(CLIENT)!r} {folder!r} "$@"\n')
    os.chmod(program, 0o755)
    begin = (
        f"import sys; path = sys.path[:]; sys.path.insert(0, {str(ROOT)!r}); from tests import warm_python as warm\n"
    )
    begin += f"warm.serve({folder!r}, {preloaded!r}, path)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [PYTHON, "-c", begin],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server.stdout:
        if server.stdout.read() != b"ready\n":
            raise RuntimeError(f"the server of {preloaded} ended with status {server.wait()}")

    def end() -> None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return program


def serve(folder: str, preloaded: str, path: list[str]) -> None:
    """Fork a process for each call until standard input ends; never returns."""
    importlib.import_module(preloaded)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(64)
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who called
    os.write(1, b"ready\n")
    os.dup2(2, 1)
    callers: dict[int, socket.socket] = {}  # process → who waits for it
    with selectors.DefaultSelector() as ready:
        for source in 0, awake, listener:
            ready.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj == 0:
                    os._exit(0)
                elif key.fileobj == awake:
                    os.read(awake, 4096)
                elif key.fileobj is listener:
                    caller = listener.accept()[0]
                    if not (request := received(caller)):
                        caller.close()
                        continue
                    if (child := os.fork()) == 0:
                        ready.close()
                        signal.set_wakeup_fd(-1)
                        for number in (awake, wake, listener.detach(), caller.detach()):
                            os.close(number)
                        for other in callers.values():
                            os.close(other.detach())
                        be(os.path.join(folder, "python"), path, *request)
                    for number in request[1]:
                        os.close(number)
                    with contextlib.suppress(BrokenPipeError):  # who called was killed, which is seen below
                        caller.sendall(child.to_bytes(8, "little"))
                    callers[child] = caller
                    ready.register(caller, selectors.EVENT_READ, child)
                elif key.data in callers:  # who called was killed
                    os.kill(key.data, signal.SIGKILL)
                    ready.unregister(key.fileobj)
            while callers:
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    break
                with callers.pop(child) as caller:
                    if caller in ready.get_map():
                        ready.unregister(caller)
                        with contextlib.suppress(BrokenPipeError):
                            caller.sendall(status.to_bytes(8, "little"))


def received(caller: socket.socket) -> tuple[dict, list[int]] | None:
    """What is to be run, and its open files; None where the caller was killed."""
    head, files, _, _ = socket.recv_fds(caller, 8, 253)
    message = b""
    while head and len(message) < int.from_bytes(head, "little"):
        if not (part := caller.recv(1 << 20)):
            break
        message += part
    return (json.loads(message.decode(errors="surrogateescape")), files) if message else None


def be(program: str, path: list[str], request: dict, files: list[int]) -> None:
    """In the forked process: run what was asked for as the main program, and end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Out of the way of the numbers that they are to have.
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 600) for number in files]
    for number in files:
        os.close(number)
    for wanted, number in zip(request["files"], high, strict=True):
        os.dup2(number, wanted, inheritable=True)
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    status = 1
    try:
        status = run(program, path, request["arguments"])
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = -signal.SIGINT
        traceback.print_exc()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            for stream in sys.stdout, sys.stderr:
                stream.flush()
        finally:
            if status == -signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(status & 0xFF)


def run(program: str, path: list[str], arguments: list[str]) -> int:
    """`python arguments`, as far as a process that runs already can be that."""
    import multiprocessing
    import runpy
    import warnings

    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    sys.executable = program
    multiprocessing.set_executable(program)
    added = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path[:] = [*added, *(item for item in path if item)]
    importlib.invalidate_caches()
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for option in os.environ.get("PYTHONWARNINGS", "").split(","):
        if option:
            warnings._processoptions([option])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    while arguments[0] in ("-u", "-B"):
        if arguments.pop(0) == "-u":
            os.environ["PYTHONUNBUFFERED"] = "1"
        else:
            sys.dont_write_bytecode = True
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in sys.stdout, sys.stderr:
            stream.reconfigure(write_through=True)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0
