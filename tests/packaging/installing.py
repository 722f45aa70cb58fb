"""The package as it is installed, and programs that use it from there."""

import os
import subprocess
from pathlib import Path

from tests.warm_python import warm_python


def start(*arguments, path, cwd, python=None, stdin=None, **environment):
    """Python with these arguments, torch and nothing else imported; `python`: another interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **environment}
    command = [python or warm_python("torch"), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, stdin=stdin, capture_output=True, text=True)


def python(*arguments, **options):
    done = start(*arguments, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def copy_of_the_source(folder, toy=None):
    """What is packaged, in a folder where setuptools may write. toy: the source in the place of the kernels."""
    repository = Path(__file__).parents[2]
    packaged = ("setup.py", "MANIFEST.in", "pyproject.toml", "README.md", "lightconv_plugin", "configs")
    for name in packaged if toy else (*packaged, "cpu", "cuda"):
        subprocess.run(["cp", "-r", repository / name, folder], check=True)
    if not toy:
        return folder
    include = '#include "common/toy.h"\n'
    kernels = {"cpu/toy.cpp": include + toy, "cpu/common/toy.h": "", "cuda/toy.cu": "", "cuda/common/toy.cuh": ""}
    kernels["lightconv_plugin/ops/autograd.h"] = ""
    for file, content in {**kernels, "cpu/README.md": "", "cuda/README.md": ""}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)
    return folder


def install(source, target, **environment):
    """`pip install .`, as it is where torch is there and no network."""
    command = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", target, source]
    return start(*command, path="", cwd=source, **environment)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
