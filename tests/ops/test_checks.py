"""Every wrong argument raises, with a message that names the argument, what came and what is allowed."""

import math
import re
import warnings

import pytest
import torch

from lightconv_plugin import ops

from .conftest import BACKENDS
from .operators import CONVOLUTIONS, random_call
from .operators import OPERATORS as FULL

T, B, H, R, K, L = 4, 3, 2, 3, 5, 5
C = H * R


def valid(operator):
    arguments = {"x": torch.randn(T, B, C)}
    if operator.startswith("talkconv"):
        arguments |= {"offset_left": torch.rand(T, B, H), "max_left": L}
    else:
        arguments["weight"] = torch.randn(T, B, H, K) if operator.startswith("dynamicconv") else torch.randn(H, K)
    if operator.endswith("_step"):
        return arguments | {"state": torch.randn(2, B, C)}
    return arguments | (
        {"offset_right": torch.rand(T, B, H), "max_right": 2} if operator == "talkconv" else {"padding_l": 2}
    )


def nested(length, *others, layout=torch.strided):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(*others)] * length, layout=layout)


CONVOLUTION_STEPS = tuple(operator + "_step" for operator in CONVOLUTIONS)
STEPS = (*CONVOLUTION_STEPS, "talkconv_step")
ALL = (*FULL, *STEPS)
FILTERS, TALK = (*CONVOLUTIONS, *CONVOLUTION_STEPS), ("talkconv", "talkconv_step")
DYNAMIC = ("dynamicconv", "dynamicconv_step")

ALLOWED_TYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
# operators, what is changed, the exception, and pieces its message holds
WRONG = [
    # types
    (ALL, {"x": None}, TypeError, ["x must be a tensor", "None"]),
    (FILTERS, {"weight": None}, TypeError, ["weight must be a tensor", "None"]),
    (FILTERS, {"bias": 1}, TypeError, ["bias must be a tensor", "1", "int"]),
    (STEPS, {"state": "past"}, TypeError, ["state must be a tensor", "'past'"]),
    (ALL, {"x": torch.ones(T, B, C, dtype=torch.int64)}, TypeError, ["x must", ALLOWED_TYPES, "torch.int64"]),
    (
        FILTERS,
        {"x": torch.ones(T, B, C).half()},
        TypeError,
        ["weight must have x's dtype torch.float16", "torch.float32"],
    ),
    (FILTERS, {"bias": torch.ones(C).double()}, TypeError, ["bias must have x's dtype torch.float32", "torch.float64"]),
    (STEPS, {"state": torch.ones(1, B, C).bfloat16()}, TypeError, ["state must have x's dtype", "torch.bfloat16"]),
    (CONVOLUTIONS, {"padding_l": 1.0}, TypeError, ["padding_l must be an int", "1.0", "float"]),
    (CONVOLUTIONS, {"padding_l": True}, TypeError, ["padding_l must be an int", "True", "bool"]),
    (FILTERS, {"normalize": None}, TypeError, ["normalize must be a str", "None"]),
    (FILTERS, {"dropout": "0.1"}, TypeError, ["dropout must be a float", "'0.1'"]),
    (FILTERS, {"dropout": True}, TypeError, ["dropout must be a float", "True", "bool"]),
    (FILTERS, {"glu": 1}, TypeError, ["glu must be a bool", "1", "int"]),
    (DYNAMIC, {"renorm_padding": None}, TypeError, ["renorm_padding must be a bool", "None"]),
    (FULL, {"lengths": [4, 2, 1]}, TypeError, ["lengths must be a tensor", "[4, 2, 1]"]),
    (FULL, {"lengths": torch.ones(B)}, TypeError, ["lengths must", "torch.int32, torch.int64", "torch.float32"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T])}, TypeError, ["cu_seqlens must", "torch.int32", "torch.int64"]),
    (ALL, {"x": torch.ones(T, B, C).to_sparse()}, TypeError, ["x must be a dense tensor", "layout torch.sparse_coo"]),
    (FILTERS, {"x": nested(T, B, C)}, TypeError, ["x must be a dense tensor, got a nested tensor"]),
    (
        FILTERS,
        {"x": nested(T, B, C, layout=torch.jagged)},
        TypeError,
        ["x must be a dense tensor, got a nested tensor"],
    ),
    # shapes
    (ALL, {"x": torch.randn(T, C)}, ValueError, ["x must have three dimensions (T, B, C)", f"({T}, {C})"]),
    (ALL, {"x": torch.randn(0, B, C)}, ValueError, ["x must have at least one time step", f"(0, {B}, {C})"]),
    (
        FILTERS,
        {"x": torch.randn(T, B, 0)},
        ValueError,
        ["x must have", "at least one", "one channel", f"({T}, {B}, 0)"],
    ),
    (FILTERS, {"x": torch.randn(T, B, 7), "glu": True}, ValueError, ["x must have an even", "2C", f"({T}, {B}, 7)"]),
    (
        FILTERS,
        {"x": torch.randn(T, C), "glu": True},
        ValueError,
        ["x must have three dimensions (T, B, 2C)", f"({T}, {C})"],
    ),
    (FILTERS, {"x": torch.randn(T, B, 7)}, ValueError, ["weight must have", "H that divides C = 7", "got H = 2"]),
    (
        FILTERS,
        {"x": torch.randn(T, B, C), "glu": True},
        ValueError,
        ["weight must have", "H that divides C = 3", "H = 2"],
    ),
    (("lightconv", "lightconv_step"), {"weight": torch.randn(H, 1, K)}, ValueError, ["(H, K)", f"({H}, 1, {K})"]),
    (("lightconv",), {"weight": torch.randn(H, 0)}, ValueError, ["weight must have at least one", f"({H}, 0)"]),
    (("lightconv",), {"weight": torch.randn(0, K)}, ValueError, ["weight must have at least one", f"(0, {K})"]),
    (DYNAMIC, {"weight": torch.randn(H, K)}, ValueError, ["(T, B, H, K)", f"T = {T}", f"B = {B}", f"got ({H}, {K})"]),
    (DYNAMIC, {"weight": torch.randn(T + 1, B, H, K)}, ValueError, ["(T, B, H, K)", f"T = {T}", f"({T + 1}, {B}"]),
    (DYNAMIC, {"weight": torch.randn(T, 1, H, K)}, ValueError, ["(T, B, H, K)", f"B = {B}", f"({T}, 1, {H}, {K})"]),
    (FILTERS, {"bias": torch.randn(C + 1)}, ValueError, [f"bias must have shape (C,) = ({C},)", f"got ({C + 1},)"]),
    (FILTERS, {"bias": torch.randn(1, C)}, ValueError, [f"bias must have shape (C,) = ({C},)", f"got (1, {C})"]),
    (
        CONVOLUTION_STEPS,
        {"state": torch.randn(K, B, C)},
        ValueError,
        ["state must", f"0 to K-1 = {K - 1}", f"got ({K}, {B}, {C})"],
    ),
    (STEPS, {"state": torch.randn(2, B + 1, C)}, ValueError, ["state must", f"{B}, {C}", f"(2, {B + 1}, {C})"]),
    (
        CONVOLUTION_STEPS,
        {"state": torch.randn(2, B, 2 * C)},
        ValueError,
        ["state must", f"{B}, {C}", f"(2, {B}, {2 * C})"],
    ),
    (STEPS, {"state": torch.randn(2, C)}, ValueError, ["state must", "(r, B, C)", f"got (2, {C})"]),
    (FULL, {"lengths": torch.tensor([4, 2])}, ValueError, [f"lengths must have shape (B,) = ({B},)", "got (2,)"]),
    (CONVOLUTIONS, {"lengths": torch.tensor([[4, 2, 1]])}, ValueError, ["lengths must have shape (B,)", "got (1, 3)"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32)}, ValueError, ["cu_seqlens", "B = 1", f"({T}, {B}"]),
    # values
    (CONVOLUTIONS, {"padding_l": -1}, ValueError, ["padding_l must satisfy 0 <= padding_l < K = 5", "got -1"]),
    (CONVOLUTIONS, {"padding_l": K}, ValueError, ["padding_l must satisfy 0 <= padding_l < K = 5", "got 5"]),
    (FILTERS, {"normalize": "softmin"}, ValueError, ["normalize must be one of softmax, none, l2", "got 'softmin'"]),
    (FILTERS, {"dropout": 1.0}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got 1.0"]),
    (FILTERS, {"dropout": -0.1}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got -0.1"]),
    (FILTERS, {"dropout": math.nan}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got nan"]),
    (FULL, {"lengths": torch.tensor([4, 5, 1])}, ValueError, ["lengths must lie in 0 to T = 4", "got 1 to 5"]),
    (
        CONVOLUTIONS,
        {"lengths": torch.tensor([4, -1, 1])},
        ValueError,
        ["lengths must lie in 0 to T = 4", "got -1 to 4"],
    ),
    # devices
    (
        FILTERS,
        {"weight": torch.empty(H, K, device="meta")},
        ValueError,
        ["weight must be on x's device cpu", "got meta"],
    ),
    (FILTERS, {"bias": torch.empty(C, device="meta")}, ValueError, ["bias must be on x's device cpu", "got meta"]),
    (STEPS, {"state": torch.empty(1, B, C, device="meta")}, ValueError, ["state must be on x's device cpu", "meta"]),
    (FULL, {"lengths": torch.ones(B, device="meta").long()}, ValueError, ["lengths must be on x's device cpu", "meta"]),
    # talkconv: types, shapes, values, devices
    (TALK, {"offset_left": None}, TypeError, ["offset_left must be a tensor", "None"]),
    (("talkconv",), {"offset_right": 0.5}, TypeError, ["offset_right must be a tensor", "0.5"]),
    (("talkconv",), {"offset_right": None}, TypeError, ["offset_right must be a tensor with max_right = 2", "None"]),
    (
        ("talkconv",),
        {"offset_right": torch.ones(T, B, H).half()},
        TypeError,
        ["offset_right must have x's dtype", "float16"],
    ),
    (TALK, {"max_left": 1.0}, TypeError, ["max_left must be an int", "1.0", "float"]),
    (TALK, {"max_left": True}, TypeError, ["max_left must be an int", "True", "bool"]),
    (("talkconv",), {"max_right": None}, TypeError, ["max_right must be an int", "None"]),
    (TALK, {"x": torch.randn(T, B, 7)}, ValueError, ["offset_left must have", "H >= 1 that divides C = 7", "H = 2"]),
    (TALK, {"offset_left": torch.rand(T, B, 0)}, ValueError, ["offset_left must have", "H >= 1", "got H = 0"]),
    (TALK, {"offset_left": torch.rand(T, B)}, ValueError, ["offset_left must have shape (T, B, H)", f"({T}, {B})"]),
    (TALK, {"offset_left": torch.rand(T + 1, B, H)}, ValueError, ["offset_left must", f"T = {T}", f"({T + 1}, {B}"]),
    (TALK, {"offset_left": torch.rand(T, 1, H)}, ValueError, ["offset_left must", f"B = {B}", f"({T}, 1, {H})"]),
    (
        ("talkconv",),
        {"offset_right": torch.rand(T, 1, H)},
        ValueError,
        ["offset_right must", f"B = {B}", f"({T}, 1, {H})"],
    ),
    (
        ("talkconv",),
        {"offset_right": torch.rand(T, B, 3)},
        ValueError,
        ["offset_right must have offset_left's H = 2", "3)"],
    ),
    (("talkconv",), {"max_right": 0}, ValueError, ["offset_right must be None with max_right = 0", f"({T}, {B}, {H})"]),
    (
        ("talkconv_step",),
        {"state": torch.randn(6, B, C)},
        ValueError,
        ["state must", "0 to max_left = 5", f"got (6, {B}, {C})"],
    ),
    (TALK, {"max_left": -1}, ValueError, ["max_left must satisfy 0 <= max_left < 2^30", "got -1"]),
    (TALK, {"max_left": 2**30}, ValueError, ["max_left must satisfy 0 <= max_left < 2^30", "got 1073741824"]),
    (
        ("talkconv",),
        {"max_right": 2**63 - 1},
        ValueError,
        ["max_right must satisfy 0 <= max_right < 2^30", f"got {2**63 - 1}"],
    ),
    (
        ("talkconv_step",),
        {"offset_left": torch.full((T, B, H), 1.5)},
        ValueError,
        ["offset_left must not exceed 1", "got 1.5"],
    ),
    (TALK, {"offset_left": torch.empty(T, B, H, device="meta")}, ValueError, ["offset_left must be on x's device cpu"]),
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


@pytest.mark.parametrize("operator", ALL)
def test_the_valid_arguments_are_valid(operator):
    getattr(ops, operator)(**valid(operator))


@pytest.mark.parametrize("operator", FULL)
@pytest.mark.parametrize(
    ("edges", "pieces"),
    [
        ([1, 6], ["not decrease, from 0 to T = 6", "first 1"]),
        ([0, 5], ["not decrease, from 0 to T = 6", "last 5"]),
        ([0, 7], ["not decrease, from 0 to T = 6", "last 7"]),
        ([0, 4, 2, 6], ["not decrease", "smallest difference -2"]),
        ([0], ["shape (N+1,)", "got (1,)"]),
        ([[0, 6]], ["shape (N+1,)", "got (1, 2)"]),
    ],
    ids=["begins-late", "ends-early", "ends-late", "falls", "no-sequence", "matrix"],
)
def test_wrong_boundaries(operator, edges, pieces):
    with pytest.raises(ValueError, match=re.escape("cu_seqlens")) as caught:
        random_call(operator, 6, 1, H, R, 2, 2)(cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize("operator", FULL)
def test_padded_and_packed_exclude_each_other(operator):
    with pytest.raises(ValueError, match="lengths and cu_seqlens must not be given together"):
        random_call(operator, 6, 1, H, R, 2, 2)(
            lengths=torch.tensor([6]), cu_seqlens=torch.tensor([0, 6], dtype=torch.int32)
        )


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_padding_l_is_required(operator):
    arguments = valid(operator)
    del arguments["padding_l"]
    with pytest.raises(TypeError, match="padding_l"):
        getattr(ops, operator)(**arguments)


@pytest.mark.parametrize("operator", ["lightconv", "lightconv_step"])
def test_renorm_padding_is_refused_where_it_means_nothing(operator):
    with pytest.raises(TypeError, match="renorm_padding"):
        getattr(ops, operator)(**valid(operator), renorm_padding=True)


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
