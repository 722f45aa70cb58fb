"""Forward and backward pass of both operators on the host against the reference in float64: sizes, types, options.

Of the cases, every run takes those that have all pairs of settings (covering.py), `-m long` the others: they say again
what the first have said, at greater length.
"""

import itertools

import pytest
import torch

from lightconv_plugin.ops.normalize import NORMALIZATIONS

from .calls import DTYPES, check
from .convolution_calls import Case
from .covering import covering, marked

OPERATORS = ("lightconv", "dynamicconv")
KERNEL_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 254, 255)
PER_HEAD = (1, 3, 8, 64)


def padding(size, which):
    """padding_l of a causal filter, a centred one, one that looks ahead, and one in between."""
    return (size - 1, (size - 1) // 2, 0, size // 4)[which % 4]


def sizes():
    """Every kernel size with every number of channels per head; the rest goes round."""
    for i, (size, per_head) in enumerate(itertools.product(KERNEL_SIZES, PER_HEAD)):
        for j, operator in enumerate(OPERATORS):
            steps = (1, 5, 17, 33, 70, 2, 129)[(i + j) % 7]
            batch, heads = (1, 2, 3)[i % 3], (1, 2, 4, 3, 8)[(i + 2 * j) % 5]
            rows = ("tbc", "btc", "sliced", "odd")[(i + i // 4) % 4]
            filters = ("plain", "taps_first", "sliced")[(i // 3 + j) % 3]
            dtype = DTYPES[(i + i // 3 + j) % 3]
            yield Case(
                operator, steps, batch, heads, per_head, size, padding(size, i + j), dtype, rows=rows, filters=filters
            )


def papers_sizes():
    """The kernel sizes of the paper in every type, with rows as long as in its models, on old and new devices."""
    for i, (operator, size, dtype) in enumerate(itertools.product(OPERATORS, (3, 7, 15, 31, 63), DTYPES)):
        for j, (heads, per_head) in enumerate(((1, 128), (4, 64), (4, 32), (8, 16))):
            capability = 75 if dtype != torch.float32 and (i + j) % 4 == 3 else 80
            yield Case(
                operator,
                (70, 150, 33, 41)[(i + j) % 4],
                (2, 1)[(i + j) % 2],
                heads,
                per_head,
                size,
                padding(size, (i + j) % 2),
                dtype,
                rows=("tbc", "btc", "tbc", "sliced")[j],
                compute_capability=capability,
            )


def options():
    """Every option with every normalisation, alone and together, for a narrow and a wide row."""
    extras = [
        {},
        {"dropout": 0.3},
        {"bias": True, "dropout": 0.5},
        {"lengths": torch.int64},
        {"lengths": torch.int32, "glu": True},
        {"packed": True},
        {"packed": True, "glu": True, "dropout": 0.25},
        {"glu": True, "bias": True},
        {"lengths": torch.int64, "dropout": 0.1, "glu": True, "bias": True},
    ]
    renorm = [
        {"renorm": True},
        {"renorm": True, "lengths": torch.int32, "dropout": 0.2},
        {"renorm": True, "packed": True, "glu": True},
    ]
    count = 0
    for operator, normalize in itertools.product(OPERATORS, NORMALIZATIONS):
        chosen = extras + renorm * (operator == "dynamicconv")
        for extra in chosen if normalize == "softmax" else chosen[count % 2 :: 2]:
            count += 1
            dtype = DTYPES[(count + count // 3) % 3]
            heads, per_head, size = ((4, 8, 5), (2, 64, 7), (2, 16, 31), (5, 3, 4), (6, 1, 3))[count % 5]
            steps, batch = (21, 4) if "packed" not in extra else (37, 1)
            rows = ("tbc", "btc", "tbc", "odd")[count // 2 % 4]
            yield Case(
                operator,
                steps,
                batch,
                heads,
                per_head,
                size,
                padding(size, count),
                dtype,
                normalize=normalize,
                rows=rows,
                **extra,
            )


def short():
    """The filters of language models: few taps, from one channel a head to many."""
    extras = [{}, {"glu": True, "bias": True}, {"packed": True}, {"lengths": torch.int64}, {"normalize": "none"}]
    for count, (operator, size, per_head) in enumerate(
        itertools.product(OPERATORS, (3, 4, 7), (1, 2, 4, 8, 16, 32, 256))
    ):
        extra = extras[count % 5]
        yield Case(
            operator,
            (100, 23, 9)[count % 3],
            1 if extra.get("packed") else (2, 3)[count % 2],
            max(16 // per_head, 1) + count % 4 // 3,
            per_head,
            size,
            padding(size, count % 3),
            DTYPES[count // 2 % 3],
            renorm=operator == "dynamicconv" and count % 3 == 1,
            rows=("tbc", "btc", "sliced", "odd")[count % 16 // 5],
            filters=("plain", "plain", "plain", "taps_first", "sliced")[count // 3 % 5],
            **extra,
        )


def inside():
    """Short filters of sequences so long that whole warps meet nothing but rows of their own sequence."""
    extras = [{}, {"bias": True}, {"packed": True}, {"lengths": torch.int64}, {"dropout": 0.3}]
    for count, (operator, size, (per_head, dtype)) in enumerate(
        itertools.product(
            OPERATORS, (3, 4, 7), ((4, torch.float32), (16, torch.float32), (8, torch.bfloat16), (32, torch.float16))
        )
    ):
        yield Case(
            operator,
            130,
            1 if count % 5 == 2 else 2,
            2,
            per_head,
            size,
            padding(size, count % 3),
            dtype,
            normalize=("softmax", "none")[count // 2 % 2],
            rows=("tbc", "btc")[count // 3 % 2],
            **extras[count % 5],
        )
    for normalize, per_head in itertools.product(("softmax", "none"), (1, 2, 4)):  # several heads in a vector
        yield Case("dynamicconv", 130, 2, 16 // per_head, per_head, 4, 3, torch.bfloat16, normalize=normalize)


EXTRAS = [
    {},
    {"glu": True},
    {"lengths": torch.int32, "bias": True},
    {"packed": True, "steps": 90},
    {"dropout": 0.4},
    {"glu": True, "lengths": torch.int64, "dropout": 0.2, "bias": True},
    {"packed": True, "glu": True, "dropout": 0.2, "steps": 70},
]


def wide():
    """Half types with rows of a head wide enough for the matrix units: sizes that do not fill a tile, all options."""
    widths = (16, 24, 40, 64, 72, 128, 136)
    for count, (operator, size, extra) in enumerate(itertools.product(OPERATORS, (8, 17, 18, 31, 49, 96), EXTRAS)):
        per_head = widths[count % 7]
        packed = extra.get("packed", False)
        yield Case(
            operator,
            extra.get("steps", (16, 31, 65, 150)[count % 4]),
            1 if packed else (2, 3)[count % 2],
            2,
            per_head,
            size,
            padding(size, count + count // 4),
            DTYPES[1 + count % 2],
            normalize=NORMALIZATIONS[count // 2 % 9] if count % 2 else "softmax",
            renorm=operator == "dynamicconv" and count % 3 == 0,
            rows=("tbc", "btc", "sliced", "odd")[count % 16 // 5],
            filters=("plain", "taps_first", "sliced")[count % 3],
            **{name: value for name, value in extra.items() if name != "steps"},
        )


def in_registers():
    """Half types with filters that the matrix units' path keeps in registers, from the shortest to the longest."""
    for count, (operator, size, extra) in enumerate(itertools.product(OPERATORS, (3, 4, 5, 7, 17, 32, 33), EXTRAS)):
        packed = extra.get("packed", False)
        yield Case(
            operator,
            extra.get("steps", (16, 31, 65, 150)[count % 4]),
            1 if packed else 2,
            2,
            (64, 128, 64, 72, 64)[count % 5],
            size,
            padding(size, count + count // 4),
            DTYPES[2 - count % 2],
            normalize=("softmax", "softmax", "none")[count % 3],
            renorm=operator == "dynamicconv" and count % 4 == 0,
            rows=("tbc", "btc", "sliced")[count % 3],
            filters=("plain", "plain", "sliced", "plain", "plain", "taps_first")[count % 6],
            **{name: value for name, value in extra.items() if name != "steps"},
        )


def shapes():
    """What does not fit the tables above."""
    for operator in OPERATORS:
        yield Case(operator, 300, 1, 2, 8, 31, 30)
        yield Case(operator, 300, 1, 1, 64, 31, 15, torch.bfloat16)
        yield Case(operator, 5, 40, 3, 4, 3, 1, torch.float16)  # many sentences
        yield Case(operator, 9, 2, 64, 1, 4, 3, torch.bfloat16)  # many heads
        yield Case(operator, 9, 2, 1, 300, 7, 3)  # one head of a size nobody has
        yield Case(operator, 9, 2, 7, 5, 7, 3, torch.bfloat16)
        yield Case(operator, 6, 0, 2, 4, 3, 1)  # no sentence at all
        yield Case(operator, 25, 2, 2, 8, 7, 3, rows="still")
        yield Case(operator, 40, 2, 2, 64, 15, 7, torch.bfloat16, rows="still")
        yield Case(operator, 12, 3, 2, 16, 1, 0, torch.bfloat16, dropout=0.5, glu=True)
        yield Case(operator, 3, 2, 2, 64, 255, 128, torch.bfloat16, dropout=0.5, lengths=torch.int64)
        yield Case(operator, 45, 3, 2, 64, 31, 30, torch.float16, dropout=0.999)


def settings(case):
    """What may decide the path that a case takes through the kernels."""
    paddings = {case.size - 1: "causal", (case.size - 1) // 2: "centred", 0: "ahead"}
    names = ("size", "per_head", "rows", "filters", "normalize", "bias", "lengths", "packed", "renorm", "glu")
    return {
        **{name: getattr(case, name) for name in (*names, "compute_capability")},
        "kernel": (case.operator, case.dtype),
        "padding": paddings.get(case.padding_l, "between"),
        "dropped": case.dropout > 0,
        "shorter than the filter": case.steps < case.size,
    }


def products(case):
    """Of a weight and a row, counting what a weight takes of its own."""
    return case.steps * case.batch * case.channels * case.size * (1 + case.dynamic)


CASES = [*sizes(), *papers_sizes(), *options(), *short(), *inside(), *wide(), *in_registers()]
EVERY_RUN = covering(CASES, settings, products)
CHOSEN = [*marked(CASES, EVERY_RUN), *shapes()]


def test_every_run_has_all_pairs_of_settings():
    def pairs(cases):
        return {pair for case in cases for pair in itertools.combinations(sorted(settings(case).items()), 2)}

    chosen = [CASES[i] for i in EVERY_RUN]
    assert pairs(chosen) == pairs(CASES) and len(chosen) < len(CASES) / 2
    assert {(case.operator, case.dtype, case.size) for case in chosen} >= set(
        itertools.product(OPERATORS, DTYPES, (3, 7, 15, 31, 63))
    )


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_numbers(on_host, case, what):
    check(case, what, on_host)
