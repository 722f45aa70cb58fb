"""What names a native library, where a finished one is looked for, and what runs on which GPU."""

import platform
import re

import pytest
import torch

from lightconv_plugin.ops import artifacts
from lightconv_plugin.ops.artifacts import NativeError


@pytest.fixture
def gpus(monkeypatch):
    """Sets the compute capabilities of the GPUs that are there."""

    def there(*capabilities):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    there()
    return there


@pytest.fixture
def cuda(plain, monkeypatch):
    """Sources of kind "cuda"."""
    (plain.sources / "toy.cu").write_text("__global__ void kernel() {}\n")
    monkeypatch.setitem(artifacts.SOURCES, "cuda", plain.sources)
    return plain


def put(root, recipe):
    """An empty file in the place of a finished library."""
    path = root / recipe.library / recipe.name / recipe.file
    path.parent.mkdir(parents=True)
    path.touch()
    return path


# ------------------------------------------------------------------------------------------------ names


def edit(toy, monkeypatch):
    toy.write("// another\n")


def add_a_header(toy, monkeypatch):
    toy.write("// new\n", "toy.h")


def rename_a_file(toy, monkeypatch):
    (toy.sources / "toy.cpp").rename(toy.sources / "other.cpp")


def move_a_file(toy, monkeypatch):
    toy.write((toy.sources / "toy.cpp").read_text(), "folder/toy.cpp")
    (toy.sources / "toy.cpp").unlink()


def edit_a_header_in_a_folder(toy, monkeypatch):
    toy.write("// changed\n", "common/toy.h")


def upgrade_torch(toy, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")


def upgrade_cuda(toy, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.0")


def other_abi(toy, monkeypatch):
    abi = torch.compiled_with_cxx11_abi()
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: not abi)


def other_machine(toy, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def other_processor(toy, monkeypatch):
    capability = "AVX2" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


CHANGES = [
    edit,
    add_a_header,
    rename_a_file,
    move_a_file,
    edit_a_header_in_a_folder,
    upgrade_torch,
    other_abi,
    other_machine,
    other_processor,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_decides_what_is_in_a_library_is_in_its_name(change, plain, monkeypatch):
    plain.write("// a header\n", "common/toy.h")
    before = artifacts.recipe("cpu")
    assert before.name == artifacts.recipe("cpu").name
    put(plain.cache, before)
    assert artifacts.find("cpu") == before.folder / before.file
    change(plain, monkeypatch)
    assert artifacts.recipe("cpu").name != before.name
    assert artifacts.find("cpu") is None


def test_the_version_of_cuda_is_in_the_name_of_cuda_libraries(cuda, monkeypatch):
    before = artifacts.recipe("cuda").name
    upgrade_cuda(cuda, monkeypatch)
    assert artifacts.recipe("cuda").name != before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.1+cpu", False),
        ("2.13.0+cpu", "2.13.0a0+git1234", False),
        ("2.13.0+cpu", "2.13.0+mine", False),
    ],
)
def test_builds_of_one_release_of_torch_share_cpu_libraries(one, other, same, cuda, monkeypatch):
    names = {"cpu": set(), "cuda": set()}
    for version in (one, other):
        monkeypatch.setattr(torch, "__version__", version)
        for kind, found in names.items():
            found.add(artifacts.recipe(kind).name)
    assert len(names["cpu"]) == (1 if same else 2) and len(names["cuda"]) == 2


def test_what_does_not_go_into_a_library_is_not_in_its_name(plain, monkeypatch, tmp_path):
    before = artifacts.recipe("cpu").name
    plain.write("notes", "README.md")
    monkeypatch.setenv("CXX", "another-compiler")
    moved = plain.sources.rename(tmp_path / "elsewhere")
    monkeypatch.setitem(artifacts.SOURCES, "cpu", moved)
    assert artifacts.recipe("cpu").name == before


@pytest.mark.parametrize(
    ("capability", "flag", "not_flag"),
    [("AVX512", "-mavx512bw", None), ("AVX2", "-mavx2", "-mavx512f"), ("DEFAULT", "-O3", "-mavx2")],
)
def test_flags_are_those_of_the_processor(capability, flag, not_flag, plain, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    flags = artifacts.recipe("cpu").cflags
    assert flag in flags and not_flag not in flags and "-fopenmp" in flags


def test_headers_are_not_compiled_by_themselves(cuda):
    cuda.write("", "toy.h")
    cuda.write("", "toy.cuh")
    assert [path.name for path in artifacts.recipe("cpu").sources] == ["toy.cpp"]
    assert [path.name for path in artifacts.recipe("cuda").sources] == ["toy.cpp", "toy.cu"]


def test_no_sources(plain):
    (plain.sources / "toy.cpp").unlink()
    with pytest.raises(NativeError, match=r"found no sources in .*the sources"):
        artifacts.find("cpu")


@pytest.mark.parametrize("kind", artifacts.KINDS)
def test_the_sources_of_this_checkout_are_found(kind):
    sources = artifacts.recipe(kind).sources
    assert {path.parent.name for path in sources} >= {"convolution", "talk"}
    # torch.utils.cpp_extension names an object after its source, without the folder.
    assert len({path.stem for path in sources}) == len(sources)


@pytest.mark.parametrize("kind", artifacts.KINDS)
def test_every_header_of_ours_is_found_and_is_in_the_librarys_name(kind):
    """Whatever compiles the sources, a sanitizer's build too, passes `include_paths`."""
    recipe, root = artifacts.recipe(kind), artifacts.SOURCES[kind]
    known = {*(path for path in root.rglob("*") if path.is_file()), *artifacts.SHARED}
    for path in known:
        # cuda_on_host….h stand in for CUDA in tests/cuda.
        for name in re.findall(r'^#include "(?!cuda_on_host)(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            assert {folder / name for folder in recipe.include_paths} & known, f"{path}: {name}"


def test_the_cache_is_where_torch_keeps_what_it_compiles(monkeypatch, tmp_path):
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    assert artifacts.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    for caches in (None, tmp_path):
        if caches:
            monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
        else:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert str(artifacts.cache_folder().resolve()) == get_default_build_root()


def test_what_came_with_the_installation_is_found_first(plain):
    recipe = artifacts.recipe("cpu")
    cached, prebuilt = put(plain.cache, recipe), put(artifacts.PREBUILT, recipe)
    assert artifacts.find("cpu") == prebuilt
    prebuilt.unlink()
    assert artifacts.find("cpu") == cached


def test_information_that_is_missing_or_damaged(plain):
    library = put(plain.cache, artifacts.recipe("cpu"))
    assert artifacts.information(library) == {}
    library.with_name("build.json").write_text("{")
    assert artifacts.information(library) == {}


# ------------------------------------------------------------------------------------------------ GPU architectures


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("9.0", ("9.0",)),
        ("9.0;8.0", ("8.0", "9.0")),
        ("8.0 8.6  9.0+PTX", ("8.0", "8.6", "9.0+PTX")),
        ("12.0;7.5;12.0;", ("7.5", "12.0")),
        ("9.0a;9.0", ("9.0", "9.0a")),
    ],
)
def test_lists_of_architectures(text, parsed):
    assert artifacts.parse_architectures(text) == parsed


@pytest.mark.parametrize("text", ["", " ; ", "90", "sm_90", "9.0,8.0", "9.0+ptx", "Hopper", "8.0;;x"])
def test_what_is_no_list_of_architectures(text):
    with pytest.raises(ValueError, match=r"must be numbers such as '8.0;9.0'"):
        artifacts.parse_architectures(text)


@pytest.mark.parametrize(
    ("architecture", "device", "runs"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("7.0+PTX", (7, 5), True),
        ("7.5+PTX", (8, 0), False),  # its kernels for matrix units are empty
        ("7.5+PTX", (12, 0), False),
        ("9.0+PTX", (8, 6), False),
        ("9.0a", (9, 0), True),
        ("10.0a", (10, 3), False),
        ("10.0a+PTX", (10, 3), False),
        ("10.0f", (10, 3), True),
        ("12.0", (12, 0), True),
        ("1.2", (12, 0), False),
        ("not-one", (8, 0), False),
    ],
)
def test_what_runs_on_which_device(architecture, device, runs):
    assert artifacts.covers(architecture, device) == runs


def test_options_of_nvcc():
    assert artifacts.gencode(["8.0", "9.0a+PTX"]) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    )


def test_what_is_compiled_for(gpus, monkeypatch):
    with pytest.raises(NativeError, match="no GPU to compile for; name the architectures"):
        artifacts.chosen_architectures()
    gpus((9, 0), (8, 0), (9, 0))
    assert artifacts.chosen_architectures() == ("8.0", "9.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert artifacts.chosen_architectures() == ("8.0", "9.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.6+PTX")
    assert artifacts.chosen_architectures() == ("7.5", "8.6+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "5.2 6.0 7.0 7.5 8.0 9.0+PTX")
    assert artifacts.chosen_architectures() == ("7.5", "8.0", "9.0+PTX")
    gpus((7, 0))
    assert artifacts.chosen_architectures() == ("7.0", "7.5", "8.0", "9.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.0")
    assert artifacts.chosen_architectures() == ("6.0",)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Ampere")
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST: GPU architectures must be"):
        artifacts.chosen_architectures()


@pytest.mark.parametrize(
    ("built", "devices", "found"),
    [
        (["8.0;9.0"], [(9, 0)], "8.0;9.0"),
        (["8.0;9.0"], [(8, 0), (9, 0)], "8.0;9.0"),
        (["8.0;9.0"], [(8, 6)], "8.0;9.0"),
        (["8.0;9.0"], [(7, 5)], None),
        (["8.0", "9.0"], [(8, 0), (9, 0)], None),
        (["8.0", "8.0;8.6", "8.6"], [(8, 6)], "8.6"),
        (["8.0+PTX"], [(12, 0)], "8.0+PTX"),
        (["7.5+PTX"], [(8, 0)], None),
        ([], [(9, 0)], None),
    ],
)
def test_a_library_for_all_devices_is_found(built, devices, found, cuda, gpus):
    paths = {text: put(cuda.cache, artifacts.recipe("cuda", artifacts.parse_architectures(text))) for text in built}
    gpus(*devices)
    assert artifacts.find("cuda") == (paths[found] if found else None)


def test_a_library_for_gpus_that_is_not_finished_or_of_other_sources_is_not_found(cuda, gpus):
    gpus((9, 0))
    wide = artifacts.recipe("cuda", ("8.0", "9.0"))
    library = put(cuda.cache, wide)
    exact = put(artifacts.PREBUILT, artifacts.recipe("cuda", ("9.0",)))
    assert artifacts.find("cuda") == exact
    exact.unlink()
    assert artifacts.find("cuda") == library
    library.unlink()
    assert artifacts.find("cuda") is None
    library.touch()
    cuda.write("// changed", "toy.cuh")
    assert artifacts.find("cuda") is None
