"""docs/environment.md: every variable that the code reads is on it, with the values that the code takes."""

import re

import pytest

from tests import ROOT

PAGE = ROOT / "docs/environment.md"
PLACES = ("lightconv_plugin", "cpu", "cuda", "scripts", "benchmarks", "tests", "setup.py")
READ = (
    r"environ(?:\.get\(|\.pop\(|\[)\s*\"(LIGHTCONV_[A-Z_]+)\"(?!\]\s*=)",  # Python; setting it is not reading it
    r"getenv\(\"(LIGHTCONV_[A-Z_]+)\"\)",
    r"\$\{?(LIGHTCONV_[A-Z_]+)",  # shell
)
ROW = re.compile(r"^\| `(LIGHTCONV_[A-Z_]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)


def variables_read():
    found = {}
    for place in PLACES:
        for path in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")):
            if path.suffix in (".py", ".sh", ".h", ".cpp", ".cu", ".cuh"):
                text = path.read_text(encoding="utf-8")
                for name in (name for pattern in READ for name in re.findall(pattern, text)):
                    found.setdefault(name, path.relative_to(ROOT))
    return found


@pytest.fixture(scope="module")
def rows():
    """{variable: its values}"""
    return {name: re.findall(r"`([^`]+)`", values) for name, values, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_every_variable_is_on_the_page_and_read(rows):
    read = variables_read()
    assert len(read) > 10 and set(rows) == set(read), {name: read.get(name) for name in set(rows) ^ set(read)}


def test_the_values_are_those_of_the_code(rows):
    from lightconv_plugin.modules import products
    from lightconv_plugin.ops import backends, instructions

    assert rows["LIGHTCONV_CPU_ISA"] == list(instructions.LEVELS)
    assert rows["LIGHTCONV_PRODUCTS"] == list(products.CHOICES)
    assert set(rows["LIGHTCONV_BACKEND"]) == set(backends.CHOICES)
