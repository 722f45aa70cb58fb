"""calls.py, and docs/architecture.md, whose lists are what it prints."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests import ROOT, programs
from tests.checkpoints import exports
from tests.fairseq_cli import RECIPE, SIZE, USER_DIR

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before 3.11")

PACKAGE = ROOT / "lightconv_plugin"
LISTS = dict(
    re.findall(
        r"^<!-- path: (\w+) -->\n```text\n(.*?)```",
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
SEARCH = "generation/native.py:NativeSearch.search"


def calls(target: str, *command) -> subprocess.CompletedProcess:
    script = ROOT / "scripts" / "dev" / "calls.py"
    return programs.run(sys.executable, script, target, sys.executable, "-m", *command, status=None)


def functions_of(file: str) -> set[str]:
    """The qualified names of the functions in a file of the package."""

    def inside(node, prefix: str):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name += child.name
                if isinstance(child, ast.FunctionDef):
                    yield name
                name += ".<locals>." if isinstance(child, ast.FunctionDef) else "."
            yield from inside(child, name)

    return set(inside(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), ""))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return exports.export(tmp_path_factory.mktemp("model") / "exported")


@pytest.mark.parametrize("name", LISTS)
def test_the_functions_of_the_page_exist(name):
    for line in LISTS[name].splitlines():
        file, _, function = line.partition(":")
        assert function in functions_of(file)


def test_the_path_of_a_translation(model, tmp_path):
    (tmp_path / "in.txt").write_text("the dog\n")
    done = calls(SEARCH, "lightconv_plugin", "translate", model, "--input", tmp_path / "in.txt")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["path"] == LISTS["translation"].splitlines()
    assert found["files"] == len({line.partition(":")[0] for line in found["path"]})
    assert set(found["path"]) <= set(found["calls"])
    assert "cli/translate.py:format_lines" not in found["calls"]  # it is called after the search


def test_a_function_that_is_not_called():
    done = calls(SEARCH, "lightconv_plugin", "user-dir")
    assert done.returncode == 1
    assert f"{SEARCH} was not called" in done.stderr


@pytest.mark.long
def test_the_path_of_a_training_step(toy_data):
    small = ("--arch", "dynamicconv", *SIZE, *RECIPE, "--dropout", 0, "--input-dropout", 0, "--max-update", 1)
    train = ("fairseq_cli.train", toy_data, "--user-dir", USER_DIR, *small, "--no-save", "--disable-validation")
    done = calls("ops/transforms.py:call", *train)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == LISTS["training"].splitlines()
