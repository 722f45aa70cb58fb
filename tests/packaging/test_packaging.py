"""The package as it is installed: alone, beside a checkout, without fairseq, with and without compiled kernels."""

import ast
import json
import platform
import re
import sys
import tarfile

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.ops import instructions
from tests.ops.toy_libraries import BROKEN, LIBRARY, TOY, Toy, relay
from tests.packaging.installing import copy_of_the_source, files, install, python, start
from tests.warm_python import warm_python

TEXTS = {".py", ".md", ".sh", ".yaml", ".jinja", ".toml", ".txt"}

REGISTERED = """
import sys, argparse
from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY as registry
utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
import lightconv_plugin
print(lightconv_plugin.__path__[0])
assert registry["dynamicconv_wmt_en_de_big"].__module__ == "lightconv_plugin.models.architectures"
"""

LOOKS_FIRST = "import importlib.util, lightconv_plugin; importlib.util.find_spec('fairseq')"

FIRST_IMPORTS = [
    "import lightconv_plugin.modules.convolutions",  # which imports the operators, and no fairseq
    "import lightconv_plugin.models.config",
    "from lightconv_plugin.generation import FastGenerator",  # itself part of what is registered
    "import fairseq",
    LOOKS_FIRST,
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The source of kernels that compile in no time."""
    return relay(Toy(tmp_path_factory.mktemp("toy"), TOY).run(LIBRARY)[0].strip())


@pytest.fixture(scope="module")
def installed(kernels, tmp_path_factory):
    """A folder with the package as `pip install .` lays it down."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    done = install(copy_of_the_source(source, kernels), folder, LIGHTCONV_PREBUILD="")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all, so that the toy is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def source(kernels, tmp_path):
    (tmp_path / "the source").mkdir()
    return copy_of_the_source(tmp_path / "the source", kernels)


@pytest.fixture
def elsewhere(tmp_path):
    return tmp_path


def test_user_dir_of_an_installed_copy(installed, elsewhere):
    user_dir = python("-m", "lightconv_plugin", "user-dir", path=installed, cwd=elsewhere)
    assert user_dir == str(installed / "lightconv_plugin")
    assert python("-c", REGISTERED, user_dir, path=installed, cwd=elsewhere, python=warm_python()) == user_dir


def test_a_checkout_given_by_user_dir_beside_an_installed_copy(installed, elsewhere, repository):
    checkout = str(repository / "lightconv_plugin")
    assert python("-c", REGISTERED, checkout, path=installed, cwd=elsewhere, python=warm_python()) == checkout


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_either_import_may_come_first(first, repository, elsewhere):
    """A program that has used the operators must still get the models when fairseq imports the user directory."""
    script = first + "\n" + REGISTERED
    user_dir = str(repository / "lightconv_plugin")
    given = warm_python() if first == "import fairseq" else None
    assert python("-c", script, user_dir, path=repository, cwd=elsewhere, python=given) == user_dir


def test_the_command_needs_no_package_to_say_what_it_does(installed, elsewhere):
    """-S: nothing but Python's own library and the installed copy."""
    for argument, said in (("--help", "maintain"), ("--version", "lightconv 0."), ("user-dir", str(installed))):
        assert said in python("-S", "-m", "lightconv_plugin", argument, path=installed, cwd=elsewhere)


def test_configurations_are_found_by_name(installed, elsewhere, repository):
    script = "from lightconv_plugin.paths import find_config; print(find_config('multi30k_en_de/dynamicconv'))"
    found = python("-c", script, path=installed, cwd=elsewhere)
    assert found == str(installed / "lightconv_plugin/configs/multi30k_en_de/dynamicconv.yaml")
    assert files(installed / "lightconv_plugin/configs") == files(repository / "configs")


def test_what_is_read_at_run_time_is_installed(installed, repository):
    """Tables, templates and the mark of typed code, each in its place."""

    def data(package):
        return [name for name in files(package) if not name.endswith((".py", ".pyc"))]

    inside = {name for name in data(installed / "lightconv_plugin") if not name.startswith(("configs/", "sources/"))}
    assert inside == set(data(repository / "lightconv_plugin")) and "py.typed" in inside


EXTRAS = [module for modules in main.EXTRAS.values() for module in modules]
WITHOUT = f"""
import sys
from lightconv_plugin.cli.main import main
sys.modules.update(dict.fromkeys({EXTRAS!r}))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["translate", "x.pt"], "fairseq"),
        (["convert", "x.pt", "y.pt", "--to", "fairseq"], "fairseq"),
        (["average", "--inputs", "x.pt", "--output", "y.pt"], "recipes"),
        (["score", "--sys", "x.txt", "--ref", "x.txt", "--lang", "de"], "recipes"),
        (["report", "x"], "report"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_command_names_the_extra_that_it_lacks(arguments, extra, repository, elsewhere):
    """In one line, where only the operators are installed."""
    state = {"model": {"w": torch.zeros(1)}, "cfg": {"model": {"_name": "dynamicconv"}}}
    torch.save(state, elsewhere / "x.pt")
    (elsewhere / "x.txt").write_text("ein Satz\n")
    (elsewhere / "x").mkdir()
    (elsewhere / "x" / "checkpoint_last.pt").symlink_to(elsewhere / "x.pt")
    done = start("-c", WITHOUT, *arguments, path=repository, cwd=elsewhere)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith(f" is not installed: pip install '.[{extra}]' in a checkout of lightconv-plugin\n")


@pytest.mark.parametrize("arguments", [["train", "smoke/dynamicconv"], ["prepare", "smoke"], ["demo"]], ids=" ".join)
def test_what_starts_fairseq_names_it_before_any_work(arguments, repository, elsewhere):
    """Its processes import it; this one does not."""
    without = WITHOUT.replace(repr(EXTRAS), repr(main.EXTRAS["fairseq"]))
    done = start("-c", without, *arguments, path=repository, cwd=elsewhere)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "is not installed: pip install '.[fairseq]' in a checkout" in done.stderr
    assert not list(elsewhere.iterdir())


def test_no_text_installs_the_package_by_its_name(repository):
    """It is on no index: another package may take the name."""
    folders = ("docs", "lightconv_plugin", "benchmarks", "scripts", "configs")
    texts = [path for folder in folders for path in (repository / folder).rglob("*") if path.suffix in TEXTS]
    by_name = re.compile(r"lightconv[-_]plugin\[|install\s+'?lightconv[-_]plugin\b")
    wrong = [
        f"{path.relative_to(repository)}: {found[0]}"
        for path in [*repository.glob("*.md"), *texts]
        for found in by_name.finditer(path.read_text(encoding="utf-8"))
    ]
    assert len(texts) > 300 and not wrong


def test_doctor_needs_only_the_operators(repository, elsewhere):
    done = start("-c", WITHOUT, "doctor", path=repository, cwd=elsewhere)
    assert "Traceback" not in done.stderr and "operators" in done.stdout


def test_the_named_extras_exist(repository):
    metadata = (repository / "pyproject.toml").read_text(encoding="utf-8")
    extras = metadata[metadata.index("[project.optional-dependencies]") :].partition("\n[project.scripts]")[0]
    assert all(f"\n{extra} = [" in extras for extra in main.EXTRAS)


def test_what_is_imported_is_installed(repository):
    """With the package, or by an extra that the command names; the others come with what uses them, or with Python."""
    metadata = (repository / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.findall(r'"(\w+)', re.search(r"^dependencies = .*", metadata, re.MULTILINE)[0])
    imported = set()
    for path in (repository / "lightconv_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - {*EXTRAS, *dependencies, *sys.stdlib_module_names, "lightconv_plugin"}
    assert {"torch", "numpy", "ninja"} <= imported
    assert others <= {"markupsafe", "transformers", "huggingface_hub", "tomllib"}


def test_the_operators_alone(installed, elsewhere, cache):
    """With torch and nothing else: no fairseq, not even when it is installed."""
    script = """
import sys
import torch
from lightconv_plugin.ops import dynamicconv
dynamicconv(torch.randn(5, 2, 8), torch.randn(5, 2, 4, 3), 2)
assert not {m.split(".")[0] for m in sys.modules} & set(sys.argv[1:]) - {"tqdm"}  # which torch itself imports if it can
"""
    python("-c", script, *EXTRAS, path=installed, cwd=elsewhere, TORCH_EXTENSIONS_DIR=str(cache))


# ------------------------------------------------------------------------------------------------ native kernels

CALL = """
import torch
from lightconv_plugin import ops
from lightconv_plugin.ops import backends
print((ops.lightconv(torch.randn(5, 2, 6), torch.randn(3, 4), 1) == 101).all().item(), backends.decision("cpu").library)
"""
SOURCES = ["cpu/common/toy.h", "cpu/toy.cpp", "cuda/common/toy.cuh", "cuda/toy.cu"]


def test_a_wheel_carries_the_sources_and_compiles_them(installed, elsewhere, cache):
    assert files(installed / "lightconv_plugin" / "sources") == SOURCES
    assert not (installed / "lightconv_plugin" / "prebuilt").exists()
    assert "Root-Is-Purelib: true" in next(installed.glob("*.dist-info/WHEEL")).read_text()
    used = python("-c", CALL, path=installed, cwd=elsewhere, TORCH_EXTENSIONS_DIR=str(cache))
    assert used.startswith(f"True {cache}/lightconv_cpu/")


def test_an_sdist_carries_the_sources(source):
    build = "from setuptools.build_meta import build_sdist; print(build_sdist('.'))"
    name = python("-c", build, path="", cwd=source).splitlines()[-1]
    with tarfile.open(source / name) as archive:
        inside = {member.name.partition("/")[2] for member in archive}
    assert {*SOURCES, "setup.py", "README.md", "lightconv_plugin/ops/compile_worker.py"} <= inside
    assert {f"configs/{name}" for name in files(source / "configs")} <= inside


def test_prebuilt_kernels_are_installed_and_used(source, elsewhere, cache, tmp_path):
    target = tmp_path / "site"
    done = install(source, target, LIGHTCONV_PREBUILD="1", TORCH_EXTENSIONS_DIR=str(cache), TORCH_CUDA_ARCH_LIST="")
    assert done.returncode == 0, done.stderr
    prebuilt = target / "lightconv_plugin" / "prebuilt" / "lightconv_cpu"
    # One for each instruction set, whether it runs here or not.
    names = {json.loads((name / "build.json").read_text())["capability"]: name for name in prebuilt.iterdir()}
    assert list(names) and names.keys() == {simd or platform.machine() for simd in instructions.compilable()}
    assert all(files(name) == ["build.json", "build.log", "lightconv_cpu.so"] for name in names.values())
    assert files(target / "lightconv_plugin" / "sources") == SOURCES
    assert "Root-Is-Purelib: false" in next(target.glob("*.dist-info/WHEEL")).read_text()
    # No cache and no compiler is needed any more.
    for level, capability in {"": "", "avx2": "AVX2"}.items():
        environment = {"TORCH_EXTENSIONS_DIR": "/dev/null/no", "PATH": "", "LIGHTCONV_CPU_ISA": level}
        used = python("-c", CALL, path=target, cwd=elsewhere, **environment)
        simd = instructions.compiled_for() if not level else min(instructions.compiled_for(), capability)
        assert used == f"True {names[simd or platform.machine()]}/lightconv_cpu.so"


def test_an_editable_installation_compiles_into_the_cache(source, cache, tmp_path):
    before = files(source / "lightconv_plugin")
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    environment = {"LIGHTCONV_PREBUILD": "1", "TORCH_EXTENSIONS_DIR": str(cache), "TORCH_CUDA_ARCH_LIST": ""}
    said = python("-c", build, path="", cwd=source, **environment)
    assert "LIGHTCONV_PREBUILD=1: without the cuda kernels: " in said or (cache / "lightconv_cuda").is_dir()
    used = python("-c", CALL, path=source, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(cache), PATH="")
    assert used.startswith(f"True {cache}/lightconv_cpu/")
    assert [name for name in files(source / "lightconv_plugin") if "__pycache__" not in name] == [
        name for name in before if "__pycache__" not in name
    ]


def test_kernels_that_do_not_compile_end_the_installation(source, tmp_path):
    (source / "cpu" / "toy.cpp").write_text(BROKEN)
    target, cache = tmp_path / "site", tmp_path / "cache"
    done = install(source, target, LIGHTCONV_PREBUILD="1", TORCH_EXTENSIONS_DIR=str(cache))
    assert done.returncode != 0 and not target.exists()
    said = done.stdout + done.stderr
    assert "LIGHTCONV_PREBUILD=1: the cpu kernels could not be compiled: " in said and "three" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", None),
        ("0", None),
        (
            "1",
            "cannot be imported: no torch here. Install torch, setuptools, wheel and ninja, then: LIGHTCONV_PREBUILD=1",
        ),
        ("yes", "LIGHTCONV_PREBUILD must be 1, 0 or unset, got 'yes'"),
    ],
    ids=["unset", "0", "1", "yes"],
)
def test_setup_py_needs_torch_for_compiling_only(value, said, source, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    arguments = ("setup.py", "-q", "build_py", "-d", tmp_path / "out")
    done = start(*arguments, path=tmp_path, cwd=source, python=sys.executable, LIGHTCONV_PREBUILD=value)
    if said is None:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "lightconv_plugin" / "sources" / "cpu" / "toy.cpp").is_file()
    else:
        assert done.returncode == 1 and said in done.stderr
