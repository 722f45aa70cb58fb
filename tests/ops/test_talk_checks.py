"""Every wrong argument of talkconv and talkconv_step raises; the message names it, what came and what is allowed."""

import math
import re

import pytest
import torch

from lightconv_plugin import ops

from .conftest import BACKENDS

T, B, H, R, L = 4, 3, 2, 3, 5
C = H * R


def valid(operator):
    arguments = {"x": torch.randn(T, B, C), "offset_left": torch.rand(T, B, H), "max_left": L}
    if operator == "talkconv_step":
        return arguments | {"state": torch.randn(2, B, C)}
    return arguments | {"offset_right": torch.rand(T, B, H), "max_right": 2}


BOTH, FULL, STEP = ("talkconv", "talkconv_step"), ("talkconv",), ("talkconv_step",)
ALLOWED_TYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
# operators, what is changed, the exception, and pieces its message holds
WRONG = [
    # types
    (BOTH, {"x": None}, TypeError, ["x must be a tensor", "None"]),
    (BOTH, {"x": [1.0]}, TypeError, ["x must be a tensor", "[1.0]", "list"]),
    (BOTH, {"offset_left": None}, TypeError, ["offset_left must be a tensor", "None"]),
    (BOTH, {"offset_left": 0.5}, TypeError, ["offset_left must be a tensor", "0.5"]),
    (FULL, {"offset_right": 0.5}, TypeError, ["offset_right must be a tensor", "0.5"]),
    (FULL, {"offset_right": None}, TypeError, ["offset_right must be a tensor with max_right = 2", "None"]),
    (STEP, {"state": "past"}, TypeError, ["state must be a tensor", "'past'"]),
    (BOTH, {"x": torch.ones(T, B, C, dtype=torch.int64)}, TypeError, ["x must", ALLOWED_TYPES, "torch.int64"]),
    (BOTH, {"offset_left": torch.ones(T, B, H).bool()}, TypeError, ["offset_left must", ALLOWED_TYPES, "torch.bool"]),
    (BOTH, {"x": torch.ones(T, B, C).half()}, TypeError, ["offset_left must have x's dtype torch.float16", "float32"]),
    (FULL, {"offset_right": torch.ones(T, B, H).half()}, TypeError, ["offset_right must have x's dtype", "float16"]),
    (STEP, {"state": torch.ones(1, B, C).bfloat16()}, TypeError, ["state must have x's dtype", "torch.bfloat16"]),
    (BOTH, {"max_left": 1.0}, TypeError, ["max_left must be an int", "1.0", "float"]),
    (BOTH, {"max_left": True}, TypeError, ["max_left must be an int", "True", "bool"]),
    (FULL, {"max_right": None}, TypeError, ["max_right must be an int", "None"]),
    (FULL, {"lengths": [4, 2, 1]}, TypeError, ["lengths must be a tensor", "[4, 2, 1]"]),
    (FULL, {"lengths": torch.ones(B)}, TypeError, ["lengths must", "torch.int32, torch.int64", "torch.float32"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T])}, TypeError, ["cu_seqlens must", "torch.int32", "torch.int64"]),
    (BOTH, {"x": torch.ones(T, B, C).to_sparse()}, TypeError, ["x must be a dense tensor", "torch.sparse_coo"]),
    (BOTH, {"offset_left": torch.ones(T, B, H).to_sparse()}, TypeError, ["offset_left must be a dense", "sparse_coo"]),
    # shapes
    (BOTH, {"x": torch.randn(T, C)}, ValueError, ["x must have three dimensions (T, B, C)", f"({T}, {C})"]),
    (BOTH, {"x": torch.randn(0, B, C)}, ValueError, ["x must have at least one time step", f"(0, {B}, {C})"]),
    (BOTH, {"x": torch.randn(T, B, 0)}, ValueError, ["x must have", "one channel", f"({T}, {B}, 0)"]),
    (BOTH, {"x": torch.randn(T, B, 7)}, ValueError, ["offset_left must have", "H >= 1 that divides C = 7", "H = 2"]),
    (BOTH, {"offset_left": torch.rand(T, B, 0)}, ValueError, ["offset_left must have", "H >= 1", "got H = 0"]),
    (BOTH, {"offset_left": torch.rand(T, B)}, ValueError, ["offset_left must have shape (T, B, H)", f"({T}, {B})"]),
    (BOTH, {"offset_left": torch.rand(T + 1, B, H)}, ValueError, ["offset_left must", f"T = {T}", f"({T + 1}, {B}"]),
    (BOTH, {"offset_left": torch.rand(T, 1, H)}, ValueError, ["offset_left must", f"B = {B}", f"({T}, 1, {H})"]),
    (FULL, {"offset_right": torch.rand(T, 1, H)}, ValueError, ["offset_right must", f"B = {B}", f"({T}, 1, {H})"]),
    (FULL, {"offset_right": torch.rand(T, B, 3)}, ValueError, ["offset_right must have offset_left's H = 2", "3)"]),
    (FULL, {"max_right": 0}, ValueError, ["offset_right must be None with max_right = 0", f"({T}, {B}, {H})"]),
    (STEP, {"state": torch.randn(6, B, C)}, ValueError, ["state must", "0 to max_left = 5", f"got (6, {B}, {C})"]),
    (STEP, {"state": torch.randn(2, B + 1, C)}, ValueError, ["state must", f"{B}, {C}", f"(2, {B + 1}, {C})"]),
    (STEP, {"state": torch.randn(2, C)}, ValueError, ["state must", "(r, B, C)", f"got (2, {C})"]),
    (FULL, {"lengths": torch.tensor([4, 2])}, ValueError, [f"lengths must have shape (B,) = ({B},)", "got (2,)"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32)}, ValueError, ["cu_seqlens", "B = 1", f"({T}, {B}"]),
    # values
    (BOTH, {"max_left": -1}, ValueError, ["max_left must satisfy 0 <= max_left < 2^30", "got -1"]),
    (BOTH, {"max_left": 2**30}, ValueError, ["max_left must satisfy 0 <= max_left < 2^30", "got 1073741824"]),
    (FULL, {"max_right": -2}, ValueError, ["max_right must satisfy 0 <= max_right < 2^30", "got -2"]),
    (FULL, {"max_right": 2**63 - 1}, ValueError, ["max_right must satisfy 0 <= max_right < 2^30", f"got {2**63 - 1}"]),
    (STEP, {"offset_left": torch.full((T, B, H), 1.5)}, ValueError, ["offset_left must not exceed 1", "got 1.5"]),
    (STEP, {"offset_left": torch.full((T, B, H), math.inf)}, ValueError, ["offset_left must not exceed 1", "got inf"]),
    (FULL, {"lengths": torch.tensor([4, 5, 1])}, ValueError, ["lengths must lie in 0 to T = 4", "got 1 to 5"]),
    # devices
    (BOTH, {"offset_left": torch.empty(T, B, H, device="meta")}, ValueError, ["offset_left must be on x's device cpu"]),
    (FULL, {"offset_right": torch.empty(T, B, H, device="meta")}, ValueError, ["offset_right must be on x's device"]),
    (STEP, {"state": torch.empty(1, B, C, device="meta")}, ValueError, ["state must be on x's device cpu", "meta"]),
    (FULL, {"lengths": torch.ones(B, device="meta").long()}, ValueError, ["lengths must be on x's device cpu", "meta"]),
]
CASES = [
    pytest.param(operator, changes, error, pieces, id=f"{operator}-{number}-{'-'.join(changes)}")
    for number, (operators, changes, error, pieces) in enumerate(WRONG)
    for operator in operators
]


@pytest.mark.parametrize(("operator", "changes", "error", "pieces"), CASES)
def test_wrong_arguments_are_named(operator, changes, error, pieces):
    with pytest.raises(error) as caught:
        getattr(ops, operator)(**valid(operator) | changes)
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize("operator", BOTH)
def test_the_valid_arguments_are_valid(operator):
    getattr(ops, operator)(**valid(operator))


def test_padded_and_packed_exclude_each_other():
    with pytest.raises(ValueError, match="lengths and cu_seqlens must not be given together"):
        ops.talkconv(
            torch.randn(6, 1, C), torch.rand(6, 1, H), None, 3, 0,
            lengths=torch.tensor([6]), cu_seqlens=torch.tensor([0, 6], dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize("edges", [[1, 6], [0, 5], [0, 4, 2, 6]], ids=["begins-late", "ends-early", "falls"])
def test_wrong_boundaries(edges):
    with pytest.raises(ValueError, match=re.escape("cu_seqlens must not decrease, from 0 to T = 6")):
        ops.talkconv(
            torch.randn(6, 1, C), torch.rand(6, 1, H), None, 3, 0, cu_seqlens=torch.tensor(edges, dtype=torch.int32)
        )


def test_a_causal_call_takes_no_right_offset():
    out = ops.talkconv(torch.randn(T, B, C), torch.rand(T, B, H), None, 3, 0)
    assert out.shape == (T, B, C)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_largest_limits(backend):
    """The fractions are exact: an offset of 2^-30 is a little less than a row."""
    x, most = torch.randn(T, B, C, dtype=torch.float64), 2**30 - 1
    offset = torch.full((T, B, H), 2.0**-30, dtype=torch.float64)
    out, scale, part = ops.talkconv(x, offset, offset, most, most), 1 / (2 * most + 1), most / 2**30
    beside = torch.zeros_like(x)
    beside[1:] += x[:-1]
    beside[:-1] += x[1:]
    torch.testing.assert_close(out / scale, x + part * beside)
    out, state = ops.talkconv_step(x, None, offset, most)
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    torch.testing.assert_close(out * (most + 1), x + part * before)
    assert torch.equal(state, x)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("limit", [-1, 2**30, 2**63 - 1])
def test_the_cpu_kernels_refuse_limits_that_overflow(limit, backend):
    """As exported graphs call them, past the checks in Python."""
    x, offset = torch.randn(T, B, C), torch.rand(T, B, H)
    for left, right in ((limit, 1), (1, limit)):
        with pytest.raises(RuntimeError, match=r"max_left and max_right in 0 … 2\^30 − 1"):
            torch.ops.lightconv.talkconv.default(x, offset, offset, None, None, left, right)
