"""Finding nvcc and its toolkit, and compiling CUDA sources by it."""

import json
import os

import pytest
import torch

from lightconv_plugin.ops import artifacts, compilation
from lightconv_plugin.ops.artifacts import NativeError

from .toy_libraries import script


@pytest.fixture
def torch_with_cuda(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NativeError, match=r"is built without CUDA.*; install torch with CUDA"):
        compilation.toolkit()


def test_no_nvcc(torch_with_cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(
        NativeError, match=f"nvcc was not found: there is no {tmp_path}/bin/nvcc; install the CUDA toolkit"
    ):
        compilation.toolkit()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("V12.4, release 12.4, x", "is CUDA 12.4, but torch was built with CUDA 13.0"),
        ("?", "prints no version"),
    ],
)
def test_an_nvcc_that_does_not_go_with_torch(version, said, torch_with_cuda, monkeypatch, tmp_path):
    script(tmp_path / "nvcc", f"echo '{version}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NativeError, match=said):
        compilation.toolkit()


def test_a_toolkit_is_where_nvcc_says(torch_with_cuda, monkeypatch, tmp_path):
    # A script on PATH that calls the nvcc of a toolkit elsewhere.
    home = tmp_path / "cuda-13.1"
    home.mkdir()
    answer = f"case $1 in --dryrun) echo '#$ TOP={home}/bin/..' >&2 ;; *) echo 'release 13.1, V13.1.5' ;; esac"
    script(tmp_path / "usr" / "bin" / "nvcc", answer)
    (home / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "usr" / "bin"), prepend=os.pathsep)
    assert compilation.toolkit() == (home, "13.1")
    script(tmp_path / "usr" / "bin" / "nvcc", "echo 'release 13.1, V13.1.5'")
    assert compilation.toolkit() == (tmp_path / "usr", "13.1")


def test_cuda_sources_are_compiled_by_nvcc_for_the_architectures(plain, monkeypatch):
    """As far as it goes with the torch that is here: without CUDA, linking is what fails."""
    nvcc = compilation.shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    release = compilation.re.search(r"release (\d+\.\d+)", compilation._output([nvcc, "--version"]))[1]
    cuda = torch.version.cuda
    monkeypatch.setattr(torch.version, "cuda", cuda or release)
    plain.write("__global__ void lightconv_kernel(float* x) { x[threadIdx.x] = 1; }\n", "toy.cu")
    monkeypatch.setitem(artifacts.SOURCES, "cuda", plain.sources)
    recipe, steps = artifacts.recipe("cuda", ("8.0", "9.0+PTX")), []
    if cuda is None:
        with pytest.raises(NativeError, match="cannot find -lc10_cuda") as failed:
            compilation.build(recipe, progress=steps.append)
        log = failed.value.log
    else:
        path = compilation.build(recipe, progress=steps.append)
        assert path.parent.name == f"{recipe.key}-8.0_9.0+PTX"
        assert json.loads(path.with_name("build.json").read_text())["architectures"] == ["8.0", "9.0+PTX"]
        log = path.with_name("build.log")
    assert {step.split()[1] for step in steps} >= {"toy.o", "toy.cuda.o"}
    said = log.read_text()
    assert "arch=compute_80,code=sm_80" in said and "arch=compute_90,code=compute_90" in said
    assert "-c" in said and "arch=compute_75" not in said
