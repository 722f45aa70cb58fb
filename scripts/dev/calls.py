"""How does a command reach a function? The calls of this package that lead there, as JSON.

    python scripts/dev/calls.py ops/transforms.py:call fairseq-train … --arch dynamicconv …
    python scripts/dev/calls.py generation/native.py:NativeSearch.search lightconv translate DIR

The first argument is the function: its file in lightconv_plugin, and its qualified name. The command runs to its end,
with its output on standard error; PYTHONPATH may name another checkout, whose package it then runs. Printed are

    path:  the functions of the package that were active when the function was first called, from the outermost
    calls: all functions of the package that had been called by then, in any process, in the order of their first calls

each as FILE:NAME, and how many `files` the path goes through. Functions without a name of their own (lambdas and the
like) and the bodies of modules are left out. Every call is watched, which makes
the command several times slower.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

TARGET, LOG = "LIGHTCONV_CALLS_TARGET", "LIGHTCONV_CALLS_LOG"
PACKAGE = f"{os.sep}lightconv_plugin{os.sep}"


def function(code) -> str:
    """FILE:NAME of a function of the package; "" for other code."""
    _, package, file = code.co_filename.rpartition(PACKAGE)
    return f"{file}:{code.co_qualname}" if package and not code.co_name.startswith("<") else ""


class Watch:
    """Writes each function at its first call in this process to the log; at the target's, also the path to it."""

    def __init__(self, target: str, log: str) -> None:
        self.target, self.names = target, {}
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND)

    def __call__(self, frame, event, _) -> None:
        if event != "call" or frame.f_code in self.names:
            return
        name = self.names[frame.f_code] = function(frame.f_code)
        if name:
            self.write(name)
        if name == self.target:
            self.write([name for active in stack(frame) if (name := function(active.f_code))])

    def write(self, what) -> None:
        """One line, which the system appends as a whole: several processes write to the log."""
        os.write(self.log, (json.dumps(what) + "\n").encode())


def stack(frame) -> list:
    """The active frames, from the outermost."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def watch() -> None:
    """Watch this process."""
    observer = Watch(os.environ[TARGET], os.environ[LOG])
    threading.setprofile(observer)
    sys.setprofile(observer)


def trace(target: str, command: list[str]) -> dict:
    """What is printed; an error if the command fails or never calls the function."""
    with tempfile.TemporaryDirectory() as folder:
        # Every process of Python imports sitecustomize when it starts.
        Path(folder, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({os.path.dirname(os.path.abspath(__file__))!r})\n"
            "import calls\nsys.path.pop()\ncalls.watch()\n"
        )
        log = Path(folder, "log")
        log.touch()
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        added = {"PYTHONPATH": os.pathsep.join(paths), TARGET: target, LOG: str(log)}
        subprocess.run(command, env=os.environ | added, stdout=sys.stderr, check=True)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    path = next((line for line in lines if isinstance(line, list)), None)
    if path is None:
        raise SystemExit(f"{target} was not called")
    calls = list(dict.fromkeys(lines[: lines.index(path)]))
    return {"path": path, "files": len({name.partition(":")[0] for name in path}), "calls": calls}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(json.dumps(trace(sys.argv[1], sys.argv[2:]), indent=1))
