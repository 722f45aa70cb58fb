"""benchmarks/NOTES.md: its floors are those of floors.py at the rates it names, and it invents no measurement."""

import re

import pytest

from benchmarks import floors
from benchmarks.shapes import SETS, Case

RATES = {"H100": 3.35e12, "H200": 4.8e12}
FLOAT_OPERATIONS, PRODUCTS = 67e12, 989e12


def shape(name):
    """The case that a row's first column names, and the bytes of an element."""
    kind = re.fullmatch(r"(short) C/H (\d+), bfloat16|(\w+conv) K (\d+), (\w+)", name).groups()
    if kind[0]:
        return "dynamicconv", next(c for c in SETS["short"] if c.channels // c.heads == int(kind[1])), 2
    size = {"bfloat16": 2, "float32": 4}[kind[4]]
    return kind[2], Case(256, 512 // size, 1024, 16, int(kind[3])), size


@pytest.fixture(scope="module")
def rows(repository):
    lines = (repository / "benchmarks" / "NOTES.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| case | pass "))
    table = lines[begin + 2 :]
    end = next(i for i, line in enumerate(table) if not line.startswith("|"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[:end]]


def test_bytes_and_floors(rows):
    assert len(rows) > 20
    for name, which, megabytes, h100, h200, *_ in rows:
        operator, case, size = shape(name)
        work = floors.work(operator, case, size)[which]
        assert round(work.bytes / 1e6) == int(megabytes), name
        assert [round(1e6 * work.bytes / rate) for rate in RATES.values()] == [int(h100), int(h200)], name
        # The bytes are the longer floor: with multiply-adds in float32, or where that is longer, by matrix products.
        operations = FLOAT_OPERATIONS if size == 4 else PRODUCTS
        assert work.bound(floors.Rates(max(RATES.values()), operations)) == "bytes", name


def test_every_path_that_computes_has_a_prediction(rows):
    assert {row[5] for row in rows} == {"short", "band", "tiles", "TaLK band", "TaLK tiles"}
    for row in rows:
        low, high = map(int, re.fullmatch(r"(\d+)–(\d+) %", row[6]).groups())
        assert 0 < low < high <= 100
