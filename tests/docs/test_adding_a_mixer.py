"""docs/adding_a_mixer.md and adding_an_option.md: copies of the package with their steps applied pass their tests."""

import shutil

import pytest

from tests import programs
from tests.docs.pages import blocks
from tests.warm_python import warm_python

# The tests to run in each copy: the page's own, and those that run over all mixers, for the new one.
TESTS = {
    "adding_a_mixer": (
        "-k", "decay", "tests/modules/test_decay.py", "tests/modules/test_mixers.py", "tests/generation/test_steps.py",
        "tests/generation/test_models.py", "tests/generation/test_native.py",
    ),
    "adding_an_option": ("tests/modules/test_dynamic_gain.py",),
}  # fmt: skip


@pytest.fixture(scope="module", params=TESTS)
def page(request, repository):
    return repository / "docs" / f"{request.param}.md"


@pytest.fixture(scope="module")
def checkout(repository, page, tmp_path_factory):
    """A copy of what the page changes, with its files written and its diffs applied."""
    root = tmp_path_factory.mktemp("mixer")
    for folder in ("lightconv_plugin", "tests"):
        shutil.copytree(repository / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("cpu", "cuda"):
        (root / folder).symlink_to(repository / folder)
    shutil.copy(repository / "pyproject.toml", root)
    for block in blocks(page, "python"):
        assert block.title, f"{block}: a Python block of this page is a file and needs a title"
        assert not (root / block.title).exists()
        (root / block.title).write_text(block.text, encoding="utf-8")
    for block in blocks(page, "diff"):
        programs.run("git", "apply", "--recount", "-", input=block.text, cwd=root)
    return root


def run(checkout, *arguments):
    environment = {"PYTHONPATH": checkout, "PYTHONDONTWRITEBYTECODE": 1}
    return programs.run(warm_python(), "-m", *arguments, cwd=checkout, **environment)


def test_the_pages_test_passes(checkout, page):
    done = run(checkout, "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *TESTS[page.stem])
    assert "passed" in done.stdout


def test_the_pages_files_are_in_style(checkout, page):
    titles = [block.title for block in blocks(page, "python")]
    changed = ("mixers.py", "modules/mixers.py", "modules/convolutions.py")
    run(checkout, "ruff", "check", "--no-cache", *titles, *(f"lightconv_plugin/{name}" for name in changed))


def test_few_lines_and_few_files(page):
    """What these pages are for: a mixer, and an option, are quick to add."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
    files = [line for block in blocks(page, "diff") for line in block.text.splitlines() if line.startswith("+++ ")]
    assert len(files) <= 3
