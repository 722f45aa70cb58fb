"""Native beam searches with random models and options, on one thread and on several: run.py starts it with a library
that was compiled with a sanitizer."""

from __future__ import annotations

import argparse
import sys
import time

from lightconv_plugin.generation import DTYPES
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.ops import backends
from tests.generation import random_models


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="searches", description=__doc__)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if backends.decision("cpu").backend != "cpu":
        raise RuntimeError(f"no native kernels: {backends.decision('cpu').reason}")
    began = time.monotonic()
    for number in range(options.cases):
        one(options.seed * 10**6 + number)
    print(f"{options.cases} searches in {time.monotonic() - began:.0f} s")
    return 0


def one(seed: int) -> None:
    """All types of arithmetic with the same results for any number of threads, and float32 with those in torch; with
    all words and with a shortlist.

    Raises:
        AssertionError: they differ.
    """
    case = random_models.random_case(seed)
    for restricted in (case, random_models.with_words(case, random_models.some_words(case, seed))):
        _search(restricted, seed)


def _search(case: random_models.Case, seed: int) -> None:
    for dtype in DTYPES:
        found = case.search(random_models.native_search, dtype=dtype, threads=1)
        if dtype == "float32":
            random_models.assert_same(case.search(TorchSearch), found, f"seed {seed}:")
        for threads in (2, 4):
            other = case.search(random_models.native_search, dtype=dtype, threads=threads)
            random_models.assert_equal(found, other, f"seed {seed}, {dtype}, {threads} threads:")


if __name__ == "__main__":
    sys.exit(main())
