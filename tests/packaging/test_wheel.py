"""What is published: the wheel with compiled kernels, the sdist, their metadata, and the workflows that make them."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.packaging.installing import copy_of_the_source, start

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPT = Path(__file__).with_name("without_compiler.py")
METADATA = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REPOSITORY = re.search(r'^Repository = "(.+)"$', METADATA, re.MULTILINE)[1]


def wheel_of(source, folder, **environment):
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = start(*command, path="", cwd=source, **environment)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory):
    """Without compiled kernels."""
    source = copy_of_the_source(tmp_path_factory.mktemp("source"))
    return wheel_of(source, tmp_path_factory.mktemp("wheel"), LIGHTCONV_PREBUILD="")


def test_a_wheel_without_kernels_serves_every_machine(plain_wheel):
    assert plain_wheel.name.endswith("-py3-none-any.whl")


def test_the_page_on_an_index_has_the_repositorys_address(plain_wheel):
    """An index shows the readme alone: its links lead to the repository, which is named in one file."""
    about = metadata_of(plain_wheel)
    assert about["Project-URL"] == f"Repository, {REPOSITORY}"
    text = about.get_payload()
    assert f"git clone {REPOSITORY} lightconv-plugin" in text and "REPOSITORY" not in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert {f"{REPOSITORY}/blob/main/docs/tutorial.md", f"{REPOSITORY}/raw/main/docs/images/block.png"} <= {*links}
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_one_file_has_the_repositorys_address():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    texts = [ROOT / name for name in listed if name.endswith((".md", ".py", ".toml", ".yml", ".yaml", ".sh", ".cff"))]
    address = REPOSITORY.encode()
    assert [path.name for path in texts if path.is_file() and address in path.read_bytes()] == ["pyproject.toml"]
    assert re.search(r"^git clone REPOSITORY ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow.keys() >= {"name", True, "permissions", "jobs"}  # YAML reads "on" as True
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        assert all(len({"uses", "run"} & step.keys()) == 1 for step in job["steps"])
        assert set(job.get("needs", ())) <= workflow["jobs"].keys()


def test_the_wheel_is_tried_with_every_supported_python():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    read = tomllib.loads(METADATA)
    settings, project = read["tool"]["cibuildwheel"], read["project"]
    versions = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))
    assert settings["build"].split() == [f"cp3{version}-manylinux_x86_64" for version in versions]
    assert settings["test-command"] == f"python {{project}}/{SCRIPT.relative_to(ROOT)}"
    assert set(settings["test-extras"]) <= project["optional-dependencies"].keys()
    pinned = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==[\d.]+$", pinned, re.MULTILINE)[0]
    assert torch in settings["before-build"] and torch in settings["before-test"]
    pytest.importorskip("cibuildwheel")
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
    assert subprocess.check_output(command, cwd=ROOT, text=True).split() == settings["build"].split()


def test_sdist_and_wheel_are_built_and_their_metadata_are_valid(tmp_path):
    """As in the workflows: the wheel is built from the sdist."""
    (tmp_path / "source").mkdir()
    source = copy_of_the_source(tmp_path / "source")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source]
    environment = {**os.environ, "LIGHTCONV_PREBUILD": ""}
    subprocess.run(build, env=environment, check=True, capture_output=True, cwd=tmp_path)
    files = sorted((tmp_path / "dist").iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    checked = [sys.executable, "-m", "twine", "check", "--strict", *files]
    said = subprocess.check_output(checked, text=True, stderr=subprocess.STDOUT)
    assert said.count("PASSED") == 2, said


@pytest.mark.long
def test_the_wheel_needs_no_compiler(tmp_path):
    """Installed into an empty environment, where torch and the text packages are found and this checkout is not."""
    (tmp_path / "source").mkdir()
    source = copy_of_the_source(tmp_path / "source")
    wheel = wheel_of(source, tmp_path / "dist", LIGHTCONV_PREBUILD="1", TORCH_CUDA_ARCH_LIST="")
    assert re.fullmatch(r"lightconv_plugin-[\w.]+-py3-none-linux_\w+\.whl", wheel.name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python, site = tmp_path / "venv/bin/python", next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed = [python, "-m", "pip", "install", "--no-deps", wheel]
    subprocess.run(installed, check=True, env={**os.environ, "PATH": ""}, capture_output=True)
    done = subprocess.run([python, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["best", "AVX2", "none"]
    assert all("translated 2 lines" in line for line in lines)
