"""Small native libraries: compilation, finding and loading are tested on them, without compiling the kernels."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightconv_plugin.ops import artifacts, backends
from tests import ROOT
from tests.warm_python import warm_python

# No torch in it, so that it compiles in no time; it has no kernels.
PLAIN = 'extern "C" int lightconv_answer() { return 42; }\n'
BROKEN = "int one = 1;\nint two = three;\n"
# Every operator for the CPU: 100, plus the number of threads that a parallel_for really uses.
TOY = """
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>
#include <mutex>
#include <set>
#include <thread>

static void count_threads(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  at::parallel_for(0, 64, 1, [&](int64_t, int64_t) {
    std::lock_guard<std::mutex> guard(mutex);
    threads.insert(std::this_thread::get_id());
  });
  const auto arguments = op.schema().arguments().size();
  size_t first = 0;
  while (!torch::jit::peek(*stack, first, arguments).isTensor()) ++first;
  const at::Tensor x = torch::jit::peek(*stack, first, arguments).toTensor();
  torch::jit::drop(*stack, arguments);
  for (size_t i = 0; i < op.schema().returns().size(); ++i)
    torch::jit::push(*stack, at::full_like(x, 100 + int64_t(threads.size())));
}

TORCH_LIBRARY_IMPL(lightconv, CPU, m) {
  for (const char* name : {OPERATORS})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&count_threads>());
}
""".replace("OPERATORS", ", ".join(f'"{name}"' for name in backends.OPERATORS + backends.CPU_OPERATORS))
# In a toy's process: prints where the library is, compiled if it must be.
LIBRARY = "assert (ops.lightconv(x, weight, 1) > 100).all(); print(backends.decision('cpu').library)"
# A compiler that waits before it compiles until the file "go" beside it exists, and says by "begun" that it was called.
SLOW_COMPILER = """\
case " $* " in
    *" -c "*) : >"{folder}/begun"; for i in $(seq 600); do [ -e "{folder}/go" ] && break; sleep 0.1; done ;;
esac
exec {compiler} "$@"
"""


def relay(library: str) -> str:
    """A source that compiles in no time: its library loads another one, which has the kernels."""
    return f'#include <dlfcn.h>\n#include <torch/version.h>\nvoid* const kernels = dlopen("{library}", RTLD_NOW);\n'


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


class Toy:
    """Sources of kind "cpu" in a folder of their own, with a cache beside them."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.sources, self.cache = folder, folder / "the sources", folder / "the cache"
        self.sources.mkdir()
        self.write(source)

    def write(self, source: str, name: str = "toy.cpp") -> None:
        path = self.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    def slow_compiler(self) -> Path:
        compiler = os.environ.get("CXX") or "c++"
        return script(self.folder / "slow", SLOW_COMPILER.format(folder=self.folder, compiler=compiler))

    def built(self) -> list[str]:
        """All that is in the cache, hidden files too."""
        return sorted(str(path.relative_to(self.cache)) for path in self.cache.rglob("*"))

    def start(self, program: str, root: Path = ROOT, python: str | None = None, **environment: str) -> subprocess.Popen:
        """Run a program in a process that has these sources and this cache."""
        begin = f"""
            from pathlib import Path
            import torch
            from lightconv_plugin import ops
            from lightconv_plugin.ops import compilation, artifacts, backends, reference
            artifacts.SOURCES["cpu"], artifacts.SHARED = Path({str(self.sources)!r}), ()
            x, weight = torch.randn(5, 2, 6), torch.randn(3, 4)
        """
        return subprocess.Popen(
            [python or warm_python("torch"), "-c", textwrap.dedent(begin) + textwrap.dedent(program)],
            env={**os.environ, "PYTHONPATH": str(root), "TORCH_EXTENSIONS_DIR": str(self.cache), **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, **options: str) -> tuple[str, str]:
        """Its stdout and stderr, once it has ended well."""
        process = self.start(program, **options)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out, err


def in_this_process(toy: Toy, monkeypatch) -> Toy:
    monkeypatch.setitem(artifacts.SOURCES, "cpu", toy.sources)
    monkeypatch.setattr(artifacts, "SHARED", ())
    monkeypatch.setattr(artifacts, "PREBUILT", toy.folder / "prebuilt")
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(toy.cache))
    # What compiles has imported what it needs; the processes of test_backends.py begin without.
    monkeypatch.setattr(sys, "executable", warm_python("torch.utils.cpp_extension"))
    monkeypatch.delenv("LIGHTCONV_BACKEND", raising=False)
    return toy


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Sources that compile but have no kernels, here in this process."""
    return in_this_process(Toy(tmp_path, PLAIN), monkeypatch)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Sources that do not compile, here in this process."""
    return in_this_process(Toy(tmp_path, BROKEN), monkeypatch)
