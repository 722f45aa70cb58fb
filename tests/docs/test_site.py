"""The site: it builds without a warning, and the reference has all operators."""

import importlib.util
import shutil
import sys

import pytest

from lightconv_plugin import ops
from tests import programs

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))),
    reason="mkdocs is not installed: pip install '.[docs]'",
)

needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="no Chromium is installed (Debian: apt install chromium)",
)


@pytest.fixture(scope="module")
def site(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = ("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    programs.run(sys.executable, *build, cwd=repository, NO_MKDOCS_2_WARNING=1)
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


def pages_at(site, repository):
    """(exit status, output) of scripts/dev/pages_at.py."""
    command = [sys.executable, repository / "scripts/dev/pages_at.py", site]
    done = programs.run(*command, status=None, timeout=600)
    return done.returncode, done.stdout + done.stderr


@needs_browser
def test_every_page_fits_the_window_of_a_phone_and_of_a_desktop(site, repository):
    status, said = pages_at(site, repository)
    assert (status, said.partition(" pages fit at ")[2]) == (0, "400, 1200 pixels\n"), said


@needs_browser
def test_what_is_too_wide_is_named(tmp_path, repository):
    scrolls = '<div style="overflow-x: auto"><p style="width: 2000px">scrolls</p></div>'
    (tmp_path / "wide.html").write_text(f'<!DOCTYPE html><body>{scrolls}<p class="big" style="width: 600px">text</p>')
    status, said = pages_at(tmp_path, repository)
    assert status == 1
    assert said == "wide.html: 608 pixels wide in a window of 400\n  p.big, to 608: text\n"
