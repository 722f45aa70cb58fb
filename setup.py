"""Compiles and copies the non-Python files of a wheel; all metadata but the readme are in pyproject.toml.

A wheel has the sources of the native kernels (lightconv_plugin/sources), which are compiled at first use. With

    LIGHTCONV_PREBUILD=1 pip install --no-build-isolation .

they are compiled at build time, against the installed torch and for CPUs with and without AVX2 and AVX-512, and
included in the wheel. Those for GPUs are left out if they cannot be compiled, such as without nvcc or without a GPU,
unless TORCH_CUDA_ARCH_LIST names the architectures: then that is an error.
An editable installation compiles into the cache, like `lightconv build`.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COPIED = {  # folder of the checkout: (folder of the package, suffixes)
    "cpu": ("sources/cpu", (".cpp", ".h")),
    "cuda": ("sources/cuda", (".cpp", ".cu", ".cuh", ".h")),
    "configs": ("configs", (".yaml", ".args")),
}
PREBUILD = os.environ.get("LIGHTCONV_PREBUILD", "")
if PREBUILD not in ("", "0", "1"):
    sys.exit(f"LIGHTCONV_PREBUILD must be 1, 0 or unset, got {PREBUILD!r}")


def readme() -> str:
    """README.md as a package index shows it: with the repository's address, which pyproject.toml holds."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', metadata, re.MULTILINE)[1]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^(git clone) REPOSITORY\b(.*?)\. REPOSITORY: .*$", rf"\1 {repository}\2", text, flags=re.MULTILINE)
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({repository}/blob/main/", text)


def prebuild() -> list[Path]:
    """Compile the kernels; returns the finished libraries."""
    sys.path.insert(0, str(ROOT))
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"LIGHTCONV_PREBUILD=1 compiles against the installed torch, which cannot be imported: {error}. "
            "Install torch, setuptools, wheel and ninja, then: LIGHTCONV_PREBUILD=1 pip install --no-build-isolation ."
        )
    from lightconv_plugin.ops.prebuild import build_all

    libraries = []
    for outcome in build_all(say=print, portable=True):
        if outcome.failed:
            sys.exit(f"LIGHTCONV_PREBUILD=1: the {outcome.kind} kernels could not be compiled: {outcome.error}")
        if outcome.error:
            print(f"LIGHTCONV_PREBUILD=1: without the {outcome.kind} kernels: {outcome.error}")
        if outcome.library:
            libraries.append(outcome.library)
    return libraries


class BuildWithKernels(build_py):
    """The Python files, the configurations, the kernels' sources and, if asked for, the kernels."""

    def run(self):
        super().run()
        libraries = prebuild() if PREBUILD == "1" else []
        if self.editable_mode:
            return
        package = Path(self.build_lib, "lightconv_plugin")
        for name in ("sources", "prebuilt", "configs"):  # left over from an earlier build in the same folder
            shutil.rmtree(package / name, ignore_errors=True)
        for name, (target, suffixes) in COPIED.items():
            for path in (ROOT / name).rglob("*"):
                if path.suffix in suffixes:
                    copy = package / target / path.relative_to(ROOT / name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
        for folder in (path.parent for path in libraries):
            shutil.copytree(folder, package / "prebuilt" / folder.parent.name / folder.name)


class MaybeBinary(Distribution):
    """A wheel with compiled kernels is platform-specific, one without is not."""

    def has_ext_modules(self):
        return PREBUILD == "1"


class WheelForAnyPython(bdist_wheel):
    """The kernels are loaded by torch and use nothing of Python's: one wheel serves every version of Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython},
    distclass=MaybeBinary,
    long_description=readme(),
    long_description_content_type="text/markdown",
)
