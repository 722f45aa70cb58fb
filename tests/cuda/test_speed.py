"""The machine code of the kernels, executed: it computes what the reference does, and does not get slower."""

import json

import numpy as np
import pytest

from .speed import execution, launches, report
from .speed.launches import Call
from .speed.listing import NoTool, nvdisasm

# Part of a release and of work on the kernels: `scripts/test.sh -m long tests/cuda`.
pytestmark = pytest.mark.long
MOST = 1.1  # times as many instructions as counts.json has


@pytest.fixture(scope="module", autouse=True)
def tools():
    try:
        nvdisasm()
        launches.compiled(launches.host.SOURCES / "convolution" / "band_forward.cu")
    except NoTool as error:
        pytest.skip(str(error))


class Tensors:
    """A call's tensors as arrays, after all of its blocks have run."""

    def __init__(self, call: Call) -> None:
        self.call, self.memory = call, execution.memory_for(call)
        for launch in launches.launches(call):
            execution.execute(launch, list(range(launch.blocks)), self.memory)

    def __call__(self, tensor: int, *shape: int) -> np.ndarray:
        return execution.values(self.call, self.memory, tensor, 0, int(np.prod(shape))).reshape(shape)


def softmax(weight):
    exponentials = np.exp(weight - weight.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def rows(x, call):
    """x (T, B, H, R) as (K, T, B, H, R): for each tap the rows that it meets, zeros outside."""
    padded = np.zeros((call.steps + call.size - 1, *x.shape[1:]))
    padded[call.padding : call.padding + call.steps] = x
    return np.stack([padded[k : k + call.steps] for k in range(call.size)])


CASES = [
    Call(dynamic, backward, 35, 2, 128, 2, size, size // 2, kind)
    for dynamic in (False, True)
    for backward in (False, True)
    for size, kind in ((3, 2), (7, 1), (31, 2), (15, 1), (31, 0))
]
# The short path.
CASES += [
    Call(dynamic, backward, 35, 2, 32, 2, 4, 3, kind)
    for dynamic in (False, True)
    for backward in (False, True)
    for kind in (0, 1, 2)
]


@pytest.mark.parametrize("call", CASES, ids=lambda c: f"{c.dynamic}-{c.backward}-K{c.size}-{launches.TYPES[c.type]}")
def test_the_code_for_a_device_computes_what_the_reference_does(call):
    done, wide = Tensors(call), (call.steps, call.batch, call.heads, call.channels // call.heads)
    x, grad = done(execution.X, *wide), done(execution.GRAD, *wide)
    filters = (call.heads, call.size) if not call.dynamic else (*wide[:3], call.size)
    weight = softmax(done(execution.WEIGHT, *filters))
    taps = np.broadcast_to(weight, (*wide[:3], call.size))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if call.type == 0 else {"rtol": 2e-2, "atol": 2e-2}
    if not call.backward:
        expected = np.einsum("tbhk,ktbhr->tbhr", taps, rows(x, call))
        np.testing.assert_allclose(done(execution.OUT, *wide), expected, **tolerance)
        return
    dx = np.zeros(wide)
    for k in range(call.size):
        for t in range(call.steps):
            if 0 <= t - call.padding + k < call.steps:
                dx[t - call.padding + k] += taps[t, :, :, k, None] * grad[t]
    np.testing.assert_allclose(done(execution.DX, *wide), dx, **tolerance)
    dtaps = np.einsum("tbhr,ktbhr->tbhk", grad, rows(x, call))
    if not call.dynamic:
        dtaps = dtaps.sum((0, 1))
    dweight = weight * (dtaps - (dtaps * weight).sum(-1, keepdims=True))
    got = done(execution.DWEIGHT, *filters)
    np.testing.assert_allclose(got, dweight, rtol=tolerance["rtol"], atol=tolerance["atol"] * np.abs(dweight).max())


def windows(call, left, right):
    """Coefficients (T, S, B, H) of the offsets (T, B, H): how much of row s an output t takes."""
    distance = (np.arange(call.steps)[:, None] - np.arange(call.steps))[..., None, None]
    reach = np.where(distance >= 0, left[:, None] * call.padding, right[:, None] * (call.size - 1 - call.padding))
    return np.clip(reach - np.abs(distance) + 1, 0, 1)


TALK = [
    Call(False, backward, 70, 2, 128, 2, 31, padding, kind, talk=True)
    for backward in (False, True)
    for padding, kind in ((15, 2), (30, 1), (15, 0))
]


@pytest.mark.parametrize("call", TALK, ids=lambda c: f"{c.backward}-{c.padding}-{launches.TYPES[c.type]}")
def test_the_code_for_a_device_computes_what_talkconv_does(call):
    done, wide = Tensors(call), (call.steps, call.batch, call.heads, call.channels // call.heads)
    x, grad = done(execution.X, *wide), done(execution.GRAD, *wide)
    left, right = done(execution.LEFT, *wide[:3]), done(execution.RIGHT, *wide[:3])
    coefficients = windows(call, left, right) / call.size
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if call.type == 0 else {"rtol": 2e-2, "atol": 2e-2}
    if not call.backward:
        expected = np.einsum("tsbh,sbhr->tbhr", coefficients, x)
        np.testing.assert_allclose(done(execution.OUT, *wide), expected, **tolerance)
        return
    np.testing.assert_allclose(done(execution.DX, *wide), np.einsum("tsbh,tbhr->sbhr", coefficients, grad), **tolerance)
    along = np.einsum("tbhr,sbhr->tsbh", grad, x)
    for side, offsets, most, result in (
        (-1, left, call.padding, execution.DLEFT),
        (1, right, call.size - 1 - call.padding, execution.DRIGHT),
    ):
        if most == 0:
            continue
        # The row that is partly in the window, if it exists, and if there is such a part.
        part = np.floor(offsets.astype(np.float32) * np.float32(most)).astype(int) + 1
        at = np.arange(call.steps)[:, None, None] + side * part
        inside = (at >= 0) & (at < call.steps) & (offsets * most > part - 1)
        taken = np.take_along_axis(along, np.clip(at, 0, call.steps - 1)[:, None], 1)[:, 0]
        expected = np.where(inside, taken, 0) * most / call.size
        np.testing.assert_allclose(done(result, *wide[:3]), expected, **{**tolerance, "atol": tolerance["atol"] * 10})


def test_what_is_counted_of_talkconv_finds_its_reaches():
    """The blocks of the last launch look up what those of the first have found: all zeros would be little work."""
    call = report.CALLS["talkconv 15 + 15 backward"]
    memory, all_launches = execution.memory_for(call), launches.launches(call)
    for launch in all_launches:
        execution.execute(launch, report.sample(launch, call), memory)
    # Blocks of the band: head, then tile of 128 rows, then batch element.
    for number in report.sample(all_launches[-1], call):
        head, b = number % call.heads, number // call.heads // 2
        first = number // call.heads % 2 * 128
        for t in (first, first + 127):
            at = (t * call.batch + b) * call.channels + head * call.channels // call.heads
            assert np.abs(execution.values(call, memory, execution.DX, at, 64)).min() > 0


def test_bank_conflicts_are_counted():
    warp = type("Warp", (), {"block": type("Block", (), {"counts": execution.Counts()})})
    lanes, everyone = np.arange(32), np.ones(32, dtype=bool)

    def wavefronts(addresses, size, mask=everyone):
        counts = warp.block.counts = execution.Counts()
        execution.Warp.count_shared(warp, addresses, size, mask)
        return counts.wavefronts

    assert wavefronts(4 * lanes, 4) == 1 and wavefronts(0 * lanes, 4) == 1
    assert wavefronts(8 * lanes, 4) == 2 and wavefronts(128 * lanes, 4) == 32
    assert wavefronts(16 * lanes, 16) == 4 and wavefronts(128 * lanes, 16) == 32
    assert wavefronts(144 * lanes, 16) == 4  # rows of 64 halves and 8 to spare: ldmatrix without conflicts
    assert wavefronts(128 * lanes, 4, lanes < 3) == 3


@pytest.mark.parametrize("name", report.CALLS)
def test_no_kernel_needs_a_tenth_more_instructions_than_before(name):
    """Slower on purpose: `scripts/dev/cuda_report.sh --speed --update`, and the table of cuda/README.md."""
    counted = report.count(report.CALLS[name])
    before = json.loads(report.COUNTS.read_text(encoding="utf-8"))[name]
    for what in ("instructions", "wavefronts"):
        assert counted[what] <= before[what] * MOST, what
