"""`lightconv build`: what is built, what it says, and how it fails."""

import ctypes
import os

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.ops import artifacts, compilation, instructions, prebuild
from lightconv_plugin.ops.artifacts import NativeError


@pytest.fixture
def built(plain, monkeypatch):
    """A machine with CUDA where nothing is really compiled: the recipes that were to be."""
    recipes = []

    (plain.sources / "toy.cu").touch()
    monkeypatch.setitem(artifacts.SOURCES, "cuda", plain.sources)
    monkeypatch.setattr(compilation, "_compile", lambda recipe, *how: recipes.append(recipe))
    monkeypatch.setattr(compilation, "toolkit", lambda: (plain.folder, "13.0"))
    monkeypatch.setattr(artifacts, "capabilities", lambda: [(9, 0)])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return recipes


def test_the_library_its_path_and_the_time(plain, capsys):
    path = artifacts.recipe("cpu").folder / "lightconv_cpu.so"
    assert main.main(["build", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"cpu: {path} (") and out.endswith(" s)\n") and path.is_file()
    target = f" for {instructions.compiled_for()}" if instructions.compiled_for() else ""
    assert err == f"cpu: compiling 1 files{target}\ncpu: 1/2 toy.o\ncpu: 2/2 lightconv_cpu.so\n"
    assert main.main(["build", "cpu"]) == 0
    assert capsys.readouterr() == (f"cpu: {path} (already built)\n", "")


def test_a_library_that_cannot_be_loaded_is_built_again(plain, capsys):
    assert main.main(["build", "cpu"]) == 0
    path = artifacts.find("cpu")
    path.write_bytes(bytes(path.stat().st_size))
    capsys.readouterr()
    assert main.main(["build", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"cpu: {path} (") and out.endswith(" s)\n")
    assert err.startswith(f"cpu: cannot load {path}: {path}: ") and "\ncpu: compiling 1 files" in err
    assert ctypes.CDLL(str(path)).lightconv_answer() == 42


def test_a_library_that_kills_who_loads_it_is_built_again(plain, capsys):
    assert main.main(["build", "cpu"]) == 0
    path = artifacts.find("cpu")
    os.truncate(path, path.stat().st_size // 2)
    path.with_name("build.json").unlink()  # as from versions that did not record the size
    capsys.readouterr()
    assert main.main(["build", "cpu"]) == 0
    assert f"cpu: cannot load {path}: it ends the process by signal " in capsys.readouterr().err
    assert ctypes.CDLL(str(path)).lightconv_answer() == 42


def test_modules_of_the_working_directory_are_not_imported(plain, tmp_path, monkeypatch, capsys):
    assert main.main(["build", "cpu"]) == 0
    (tmp_path / "only_here.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(prebuild, "_LOAD", "import only_here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compilation, "_compile", lambda *_, **__: pytest.fail("built again"))
    capsys.readouterr()
    assert main.main(["build", "cpu"]) == 0
    assert capsys.readouterr().err == ""


def test_a_library_that_can_be_neither_loaded_nor_built_is_a_failure(plain, monkeypatch, capsys):
    recipe = artifacts.recipe("cpu")
    recipe.folder.mkdir(parents=True)
    (recipe.folder / recipe.file).touch()
    monkeypatch.setenv("PATH", "")
    assert main.main(["build", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"cpu: cannot load {recipe.folder / recipe.file}: " in err
    assert "lightconv build: error: cpu: no C++ compiler was found" in err


def test_a_portable_library_is_one_for_each_instruction_set(built, monkeypatch, capsys):
    monkeypatch.setattr(instructions, "compiled_for", lambda: "AVX512")
    assert main.main(["build", "cpu"]) == 0
    assert [recipe.simd for recipe in built] == ["AVX512"]
    assert main.main(["build", "cpu", "--portable"]) == 0
    assert [recipe.simd for recipe in built[1:]] == list(instructions.compilable())
    assert len({recipe.name for recipe in built[1:]}) == len(instructions.compilable())
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(instructions.compilable())


def test_a_failure_names_the_log(broken, capsys):
    assert main.main(["build", "cpu"]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("lightconv build: error: cpu: ") and "three" in last
    assert last.endswith(f"log: {artifacts.recipe('cpu').folder}.log")


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ([], [("cpu", ()), ("cuda", ("9.0",))]),
        (["cpu"], [("cpu", ())]),
        (["cuda"], [("cuda", ("9.0",))]),
        (["cuda", "cpu"], [("cpu", ()), ("cuda", ("9.0",))]),
        (["--cuda-arch", "8.0;9.0"], [("cpu", ()), ("cuda", ("8.0", "9.0"))]),
        (["cuda", "--cuda-arch", "12.0+PTX"], [("cuda", ("12.0+PTX",))]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else None,
)
def test_what_is_built(arguments, made, built):
    assert main.main(["build", *arguments]) == 0
    assert [(recipe.kind, recipe.architectures) for recipe in built] == made


def test_the_environment_names_architectures(built, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.6")
    assert main.main(["build", "cuda"]) == 0
    assert built[0].architectures == ("7.5", "8.6")
    assert main.main(["build", "cuda", "--cuda-arch", "9.0"]) == 0
    assert built[1].architectures == ("9.0",)


def test_no_gpu_is_needed_if_architectures_are_named(built, monkeypatch, capsys):
    monkeypatch.setattr(artifacts, "capabilities", lambda: [])
    assert main.main(["build", "cuda", "--cuda-arch", "9.0"]) == 0
    assert main.main(["build", "cuda"]) == 1
    assert "there is no GPU to compile for; name the architectures" in capsys.readouterr().err
    assert main.main(["build"]) == 0
    assert "cuda: not built: there is no GPU to compile for\n" in capsys.readouterr().out
    assert [recipe.kind for recipe in built] == ["cuda", "cpu"]


def test_cuda_is_left_out_where_it_cannot_be_unless_asked_for(built, monkeypatch, capsys):
    def no_toolkit():
        raise NativeError("nvcc was not found", "install it")

    monkeypatch.setattr(compilation, "toolkit", no_toolkit)
    assert main.main(["build"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("cuda: not built: nvcc was not found\n") and "cuda" not in err
    for arguments in (["cuda"], ["--cuda-arch", "9.0"], ["cpu", "cuda"]):
        assert main.main(["build", *arguments]) == 1
        assert "lightconv build: error: cuda: nvcc was not found; install it\n" in capsys.readouterr().err


def test_cuda_that_does_not_compile_fails_only_what_asked_for_it(built, monkeypatch, capsys):
    """As with a g++ that is too new for nvcc: the CPU's kernels are there, and a wheel can have them alone."""
    compiled = prebuild._build

    def one(recipe, say):
        if recipe.kind == "cuda":
            raise NativeError("unsupported GNU version")
        return compiled(recipe, say)

    monkeypatch.setattr(prebuild, "_cuda_recipe", lambda architectures: artifacts.recipe("cuda", ("9.0",)))
    monkeypatch.setattr(prebuild, "_build", one)
    assert main.main(["build"]) == 0
    assert capsys.readouterr().out.endswith("cuda: not built: unsupported GNU version\n")
    assert main.main(["build", "cuda"]) == 1
    for listed in ("native", " "):  # names no architecture
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert main.main(["build"]) == 0
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    capsys.readouterr()
    assert main.main(["build"]) == 1
    assert "lightconv build: error: cuda: unsupported GNU version" in capsys.readouterr().err


def test_what_is_there_needs_no_toolkit(built, monkeypatch, capsys):
    def no_toolkit():
        raise NativeError("nvcc was not found")

    monkeypatch.setattr(compilation, "toolkit", no_toolkit)
    recipe = artifacts.recipe("cuda", ("9.0",))
    recipe.folder.mkdir(parents=True)
    (recipe.folder / recipe.file).touch()
    monkeypatch.setattr(prebuild, "_LOAD", "")
    assert main.main(["build", "cuda", "--cuda-arch", "9.0"]) == 0
    assert capsys.readouterr().out.startswith(f"cuda: {recipe.folder / recipe.file} (")


def test_a_torch_without_cuda_is_said(plain, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main.main(["build", "cuda", "--cuda-arch", "9.0"]) == 1
    assert "is built without CUDA, which CUDA kernels need" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu"], "can build cpu and cuda, got 'gpu'"),
        (["cpu", "--cuda-arch", "9.0"], "--cuda-arch applies to the CUDA kernels"),
        (["cuda", "--portable"], "--portable applies to the CPU kernels"),
        (["--cuda-arch", "sm_90"], "--cuda-arch: GPU architectures must be numbers such as '8.0;9.0'"),
        (["--cuda-arch", ""], "--cuda-arch: GPU architectures must be numbers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments(arguments, said, built, refusal):
    assert said in refusal("build", *arguments)
    assert not built


def test_a_wrong_environment(built, monkeypatch, refusal):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert "TORCH_CUDA_ARCH_LIST: GPU architectures must be numbers" in refusal("build", "cuda")
