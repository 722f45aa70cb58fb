"""The site: it builds without a warning, and the reference has all operators."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lightconv_plugin import ops

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))),
    reason="mkdocs is not installed: pip install '.[docs]'",
)


@pytest.fixture(scope="module")
def site(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds_without_a_warning(site):
    assert (site / "index.html").is_file()


def test_the_reference_has_every_operator(site):
    page = (site / "operators" / "index.html").read_text(encoding="utf-8")
    missing = [name for name in ops.__all__ if f'id="lightconv_plugin.ops.{name}"' not in page]
    assert not missing


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = [
            part for part in text.split("<")[1:] if part.startswith(("script src=", 'link rel="stylesheet"', "img"))
        ]
        assert not [part[:120] for part in loaded if "//" in part.split(">")[0]], page.name
