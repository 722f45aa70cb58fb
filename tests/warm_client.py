"""The program of warm_python.py: `warm_client.py FOLDER [arguments of python …]`. It imports as little as it can."""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def call(folder: str, arguments: list[str]) -> None:
    """Be the process that the server runs for us."""
    for option in arguments:
        if not option.startswith("-") or option in ("-c", "-m"):
            break
        if option not in ("-u", "-B"):  # what changes how Python starts: let it start
            os.execv(sys.executable, [sys.executable, *arguments])
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = sorted(number for number in files if os.path.exists(f"/proc/self/fd/{number}"))
    files = [number for number in files if number < 3 or os.get_inheritable(number)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(folder, "socket"))
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(), "files": files})
    message = request.encode(errors="surrogateescape")
    socket.send_fds(server, [len(message).to_bytes(8, "little")], files)
    server.sendall(message)
    child = int.from_bytes(server.recv(8), "little")
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    status = os.waitstatus_to_exitcode(int.from_bytes(server.recv(8), "little"))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    call(sys.argv[1], sys.argv[2:])
