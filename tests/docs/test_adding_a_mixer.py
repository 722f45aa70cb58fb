"""docs/adding_a_mixer.md: its steps are applied to a copy of the package, and its test must pass there."""

import os
import shutil
import subprocess

import pytest

from tests.docs.pages import blocks
from tests.warm_python import warm_python


@pytest.fixture(scope="module")
def checkout(repository, tmp_path_factory):
    """A copy of what the page changes, with its files written and its diffs applied."""
    root = tmp_path_factory.mktemp("mixer")
    for folder in ("lightconv_plugin", "tests"):
        shutil.copytree(repository / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("cpu", "cuda"):
        (root / folder).symlink_to(repository / folder)
    shutil.copy(repository / "pyproject.toml", root)
    page = repository / "docs" / "adding_a_mixer.md"
    for block in blocks(page, "python"):
        assert block.title, f"{block}: a Python block of this page is a file and needs a title"
        assert not (root / block.title).exists()
        (root / block.title).write_text(block.text, encoding="utf-8")
    for block in blocks(page, "diff"):
        done = subprocess.run(
            ["git", "apply", "--recount", "-"], input=block.text, text=True, cwd=root, capture_output=True
        )
        assert done.returncode == 0, f"{block} does not apply: {done.stderr}"
    return root


def run(checkout, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [warm_python(), "-m", *arguments], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_pages_test_passes(checkout):
    """And those that run over all mixers, for the new one."""
    done = run(
        checkout, "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "decay",
        "tests/modules/test_decay.py", "tests/generation/test_steps.py", "tests/generation/test_models.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_the_pages_files_are_in_style(checkout, repository):
    titles = [block.title for block in blocks(repository / "docs" / "adding_a_mixer.md", "python")]
    changed = [f"lightconv_plugin/{folder}mixers.py" for folder in ("", "modules/", "generation/")]
    done = run(checkout, "ruff", "check", "--no-cache", *titles, *changed)
    assert done.returncode == 0, done.stdout + done.stderr
