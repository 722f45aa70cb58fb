"""Look for violations for as long as one likes: `scripts/dev/fuzz.sh MINUTES`.

Rounds of random cases, alternating between the backends and the properties of properties.py. Every round has a
seed of its own, made of --seed and its number, so that a run can be repeated. A failure is shrunk, printed as a case
that can be pasted into tests/fuzz/test_fuzz.py, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.robustness.fuzz import backends, properties
from tests.robustness.fuzz.strategies import OPERATORS

ROUND = 100


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    began = said = time.monotonic()
    counts, number = Counter(), 0
    while number == 0 or (time.monotonic() - began < 60 * options.minutes and sum(counts.values()) < options.cases):
        for backend in options.backends:
            try:
                one_round(backend, options.operators, options.seed * 10**6 + number, min(ROUND, options.cases), counts)
            except AssertionError as error:
                print(f"FAILED after {sum(counts.values())} cases: backend {backend}, round {number}\n{error}")
                print("\n".join(getattr(error, "__notes__", [])))
                return 1
        number += 1
        if not options.quiet and time.monotonic() - said > 30:
            said = time.monotonic()
            _say(counts, said - began)
    _say(counts, time.monotonic() - began)
    return 0


def one_round(backend: str, operators: tuple[str, ...], seed: int, cases: int, counts: Counter) -> None:
    """`cases` of all properties, counted in `counts` by backend and property.

    Raises:
        AssertionError: a violation, with the shrunk case in its notes.
    """
    profile = settings(
        max_examples=(cases + 2) // 3,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    with backends.computing(backend) as device:
        for what in properties.PROPERTIES:
            _hold(what, backend, device, operators, seeded(seed), profile, counts)


def _hold(what: str, backend: str, device: str, operators: tuple[str, ...], seed, profile: settings, counts: Counter):
    strategy, check = properties.PROPERTIES[what]

    @seed
    @profile
    @given(strategy(operators, backends.dtypes_of(backend)))
    def holds(drawn):
        check(drawn, backend, device)
        counts[backend, what] += 1

    holds()


def _say(counts: Counter, seconds: float) -> None:
    total = sum(counts.values())
    parts = ", ".join(f"{backend}: {count} {what}" for (backend, what), count in sorted(counts.items()))
    print(f"{total} cases in {seconds / 60:.1f} min, {total / seconds:.1f} cases/s ({parts})", flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("minutes", type=float, help="how long; the round then running is finished")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="no more than about so many")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--operators", type=lambda text: tuple(text.split(",")), default=OPERATORS)
    parser.add_argument("--backends", type=lambda text: tuple(text.split(",")), default=backends.available()[:2])
    parser.add_argument("--quiet", action="store_true", help="one line, at the end")
    options = parser.parse_args(arguments)
    for name, allowed in (("operators", OPERATORS), ("backends", backends.BACKENDS)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name} must be of {', '.join(allowed)}, got {', '.join(sorted(unknown))}")
    for name in ("minutes", "cases", "threads"):
        if not getattr(options, name) > 0:
            parser.error(f"{name} must be above 0, got {getattr(options, name)}")
    if "cuda" in options.backends and not torch.cuda.is_available():
        parser.error("--backends cuda: torch sees no CUDA device")
    return options


if __name__ == "__main__":
    sys.exit(main())
