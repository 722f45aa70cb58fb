"""hypothesis strategies for cases: every option of the operators, sizes that shrink towards one row of one channel."""

from __future__ import annotations

from hypothesis import strategies as st

from lightconv_plugin.ops import NORMALIZATIONS
from tests.robustness.fuzz.case import DTYPES, FILTERS, LOGITS, ROWS, Convolution, Talk

CONVOLUTIONS = ("lightconv", "dynamicconv")
OPERATORS = (*CONVOLUTIONS, "talkconv")

# Around the kernels' own limits: vectors of 4, 8 and 16 channels, tiles of 128 rows, taps in blocks of 8 and 16.
_STEPS = (127, 128, 129, 150, 257)
_PER_HEAD = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 72)
_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 65, 90)
_REACHES = (0, 1, 2, 3, 5, 7, 15, 16, 31, 40, 100)
# Multiplications of a case's float64 answer, about: what a case may cost.
_MOST = 4_000_000


# The seed of a random layout of every tensor.
VIEWS = st.integers(0, 2**20)


def cases(
    operators: tuple[str, ...] = OPERATORS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    empty: bool = True,
    views: st.SearchStrategy = st.none(),  # noqa: B008
):
    """Cases of any of the operators; `empty`: batches of no sentence among them."""
    kinds = [convolutions(name, dtypes, empty, views) for name in CONVOLUTIONS if name in operators]
    kinds += [talks(dtypes, empty, views)] * ("talkconv" in operators)
    return st.one_of(kinds)


@st.composite
def convolutions(draw, operator: str, dtypes: tuple[str, ...], empty: bool, views: st.SearchStrategy) -> Convolution:
    size = draw(st.sampled_from(_SIZES))
    common = draw(_common(dtypes, empty, size - 1, views))
    normalize = draw(st.sampled_from(NORMALIZATIONS))
    logits = draw(st.sampled_from(LOGITS))
    renorm = operator == "dynamicconv" and draw(st.booleans())
    if logits == "masked" and (normalize != "softmax" or renorm or common["views"] is not None):
        logits = "normal"  # where a filter may be −∞ alone, which is NaN (test_extreme_logits.py)
    if logits == "extreme" and (normalize in ("sigmoid", "tanh") or common["dtype"] == "float16"):
        logits = "large"  # float64 itself overflows on the way; float16 has no such results
    if logits in ("zero", "small") and normalize in ("l2", "abs_l2", "l1") and common["dtype"] == "float16":
        logits = "normal"  # gradients of 10⁶ are ±∞ in float16, and their sum over pieces NaN
    return Convolution(
        **common,
        operator=operator,
        size=size,
        padding_l=size - 1 if common["pieces"] else draw(st.integers(0, size - 1)),
        normalize=normalize,
        logits=logits,
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9))),
        bias=draw(st.booleans()),
        glu=draw(st.booleans()),
        renorm=renorm,
        filters=draw(st.sampled_from(FILTERS)),
    )


@st.composite
def talks(draw, dtypes: tuple[str, ...], empty: bool, views: st.SearchStrategy) -> Talk:
    left = draw(st.sampled_from(_REACHES))
    common = draw(_common(dtypes, empty, left, views))
    stepwise = common["pieces"] is not None
    return Talk(
        **common,
        left=left,
        right=0 if stepwise else draw(st.sampled_from(_REACHES)),
        most=1.0 if stepwise else draw(st.sampled_from((1.0, 1.0, 0.3, 2.5, 30.0))),
        ends=draw(st.sampled_from(("between", "whole"))),
        far=draw(st.booleans()),
        filters=draw(st.sampled_from(FILTERS)),
    )


@st.composite
def _common(draw, dtypes: tuple[str, ...], empty: bool, history: int, views: st.SearchStrategy) -> dict:
    """The fields of Case; `history`: rows that a state can hold."""
    mode = draw(st.sampled_from(("whole", "whole", "lengths", "packed", "pieces")))
    steps = draw(st.one_of(st.integers(1, 12), st.integers(1, 40), st.sampled_from(_STEPS)))
    if mode == "pieces":
        steps = min(steps, 24)
    heads = draw(st.integers(1, 4))
    per_head = draw(st.sampled_from(_PER_HEAD))
    batch = 1 if mode == "packed" else draw(st.integers(0 if empty else 1, 4))
    cost = steps * steps * (history + 1 + per_head)
    while batch > 1 and batch * heads * cost > _MOST:
        batch -= 1
    while heads > 1 and heads * cost > _MOST:
        heads -= 1
    fields = {
        "steps": steps,
        "batch": batch,
        "heads": heads,
        "per_head": per_head,
        "dtype": draw(st.sampled_from(dtypes)),
        "rows": draw(st.sampled_from(ROWS)),
        "grads": draw(st.sampled_from(ROWS)),
        "views": draw(views),
        "seed": draw(st.integers(0, 2**20)),
        "pieces": None,
    }
    if mode == "lengths":
        fields["lengths"] = tuple(draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch)))
        fields["long_lengths"] = draw(st.booleans())
    elif mode == "packed":
        fields["edges"] = (0, *sorted(draw(st.lists(st.integers(0, steps), max_size=6))), steps)
    elif mode == "pieces":
        cuts = sorted(draw(st.sets(st.integers(1, steps - 1)))) if steps > 1 else []
        fields["pieces"] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, steps], strict=True))
        fields["seen"] = draw(st.integers(0, min(history, 20)))
        fields["reorder"] = draw(st.booleans())
    return fields
