"""How fast the kernels of the benchmarks' shapes can be at best, by their instructions: no GPU.

    scripts/dev/cuda_report.sh --speed [--update] [NAME …]

For each call of 64M elements (32M in float32 and for "short"), per 16 rows of 64 channels: instructions that warps
issue and wavefronts of shared memory. Times of an H200: of the bytes that must move (benchmarks/floors.py) at 4.3 TB/s;
of the instructions, at 4 a clock on each of 132 multiprocessors at 1.75 GHz; of the wavefronts, at one a clock. `share`
is the share of the bandwidth that is left if nothing else is in the way. `moved` is the bytes of the sectors that warps
ask for, over those that must move: the rest comes from the cache. `warps` is how many fit on a multiprocessor.

--update writes what was counted to counts.json, by which tests/cuda/test_speed.py judges later changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import floors
from benchmarks import report as tables
from benchmarks.shapes import Case

from .execution import code_of, execute, memory_for
from .launches import TYPES, Call, Launch, launches
from .listing import NoTool

COUNTS = Path(__file__).with_name("counts.json")
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.75e9, 4.3e12
ISSUES = 4 * MULTIPROCESSORS * CLOCK  # warp instructions a second
_TILE = 16 * 64


def _call(dynamic: bool, backward: bool, size: int, **others) -> Call:
    sizes = {"steps": 256, "batch": 256, "channels": 1024, "heads": 16, "padding": (size - 1) // 2}
    return Call(dynamic, backward, size=size, **(sizes | others))


def _short(backward: bool, per_head: int, **options) -> Call:
    sizes = {"steps": 4096, "batch": 4, "channels": 2048, "heads": 2048 // per_head, "padding": 3}
    return _call(True, backward, 4, **sizes, normalize=1, batch_first=True, **options)


CALLS = {
    f"{'dynamicconv' if dynamic else 'lightconv'} K {size} {'backward' if backward else 'forward'}":
        _call(dynamic, backward, size)
    for dynamic in (False, True) for size in (3, 7, 15, 31) for backward in (False, True)
}  # fmt: skip
CALLS |= {
    f"short C/H {per_head} {'backward' if backward else 'forward'}": _short(backward, per_head)
    for per_head in (1, 16)
    for backward in (False, True)
}
CALLS |= {
    f"short C/H 16 dropout {'backward' if backward else 'forward'}": _short(backward, 16, dropout=True)
    for backward in (False, True)
}
CALLS |= {
    f"{'dynamicconv' if dynamic else 'lightconv'} K 31 dropout {'backward' if backward else 'forward'}":
        _call(dynamic, backward, 31, dropout=True)
    for dynamic in (False, True) for backward in (False, True)
}  # fmt: skip
CALLS |= {
    f"dynamicconv K 31 float32 {'backward' if backward else 'forward'}":
        _call(True, backward, 31, batch=128, type=TYPES.index("float32"))
    for backward in (False, True)
}  # fmt: skip
CALLS |= {
    "talkconv 15 + 15 forward": _call(False, False, 31, talk=True),
    "talkconv 15 + 15 backward": _call(False, True, 31, talk=True),
    "talkconv 30 + 0 forward": _call(False, False, 31, padding=30, talk=True),
}


def sample(launch: Launch, call: Call) -> list[int]:
    """Some blocks from the middle: neighbours in time, of heads next to each other (whose filters begin elsewhere in
    dropout's blocks of four). In talkconv's backward pass the first of them finds what the others look up: the reaches
    of four heads of the same sequence."""
    count = min(2, launch.blocks)
    stride = call.heads + 1 if launch.blocks > 8 * call.heads else 1
    return [launch.blocks // 2 + i * stride for i in range(count)] if launch.blocks > 2 else list(range(count))


def count(call: Call) -> dict:
    """What a call costs, in all of its launches."""
    memory = memory_for(call)
    issued = wavefronts = sectors = 0.0
    warps = []
    for launch in launches(call):
        numbers = sample(launch, call)
        counts = execute(launch, numbers, memory)
        each = launch.blocks / len(numbers)
        issued += counts.issued * each
        wavefronts += counts.wavefronts * each
        sectors += (counts.read_sectors + counts.written_sectors) * each
        warps.append(resident_warps(launch))
    tiles = call.steps * call.batch * call.channels / _TILE
    return {
        "instructions": round(issued / tiles, 1),
        "wavefronts": round(wavefronts / tiles, 1),
        "bytes": round(32 * sectors / tiles),
        "warps": warps[0],
    }


def resident_warps(launch: Launch) -> int:
    """Of a multiprocessor, by its registers (allotted in 256s), its shared memory and its 64 warps."""
    _, registers = code_of(launch)
    of_block = -(-launch.threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // of_block
    by_shared = 228 * 1024 // (launch.shared + 1024)
    return of_block * min(by_registers, by_shared, 64 // of_block, 32)


def times(call: Call, counted: dict) -> tuple[float, float, float, float]:
    """Seconds of the bytes, the instructions and the wavefronts; the bytes."""
    case = Case(call.steps, call.batch, call.channels, call.heads, call.size, causal=call.padding == call.size - 1)
    itemsize = 4 if TYPES[call.type] == "float32" else 2
    operator = "talkconv" if call.talk else "dynamicconv" if call.dynamic else "lightconv"
    work = floors.work(operator, case, itemsize)
    least = work["backward" if call.backward else "forward"].bytes
    tiles = call.steps * call.batch * call.channels / _TILE
    return (
        least / BANDWIDTH,
        counted["instructions"] * tiles / ISSUES,
        counted["wavefronts"] * tiles / (MULTIPROCESSORS * CLOCK),
        least / tiles,
    )


def row(name: str, counted: dict) -> list[str]:
    by_bytes, by_issue, by_shared, least = times(CALLS[name], counted)
    share = by_bytes / max(by_bytes, by_issue, by_shared)
    figures = [f"{counted['instructions']:.0f}", f"{counted['wavefronts']:.0f}", f"{counted['bytes'] / least:.2f}"]
    figures += [f"{1e6 * seconds:.0f}" for seconds in (by_bytes, by_issue, by_shared)]
    return [name, *figures, str(counted["warps"]), f"{100 * share:.0f} %"]


HEADERS = ["call", "instructions", "wavefronts", "moved", "bytes, µs", "issue, µs", "shared, µs", "warps", "share"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cuda_report.sh --speed", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"calls; default: all of {', '.join(CALLS)}")
    parser.add_argument("--update", action="store_true", help=f"write what was counted to {COUNTS.name}")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in CALLS:
            parser.error(f"NAME must be one of {', '.join(CALLS)}, got {name!r}")
    try:
        counted = {name: count(CALLS[name]) for name in options.names or CALLS}
    except NoTool as error:
        print(f"cuda_report.sh: error: {error}", file=sys.stderr)
        return 1
    print(tables.table(HEADERS, [row(name, each) for name, each in counted.items()]))
    if options.update:
        before = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
        tables.write_json(COUNTS, {name: (before | counted)[name] for name in CALLS if name in before | counted})
    return 0


if __name__ == "__main__":
    sys.exit(main())
