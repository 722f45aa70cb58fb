"""Every wrong argument raises, with a message that names the argument, what came and what is allowed."""

import math
import re
import warnings

import pytest
import torch

from lightconv_plugin import ops

T, B, H, R, K = 4, 3, 2, 3, 5
C = H * R


def valid(operator):
    arguments = {"x": torch.randn(T, B, C), "weight": torch.randn(H, K)}
    if operator.startswith("dynamicconv"):
        arguments["weight"] = torch.randn(T, B, H, K)
    if operator.endswith("_step"):
        arguments["state"] = torch.randn(2, B, C)
    else:
        arguments["padding_l"] = 2
    return arguments


def nested(length, *others, layout=torch.strided):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(*others)] * length, layout=layout)


ALL = ("lightconv", "dynamicconv", "lightconv_step", "dynamicconv_step")
FULL = ("lightconv", "dynamicconv")
STEP = ("lightconv_step", "dynamicconv_step")
DYNAMIC = ("dynamicconv", "dynamicconv_step")

ALLOWED_TYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
# operators, what is changed, the exception, and pieces its message holds
WRONG = [
    # types
    (ALL, {"x": None}, TypeError, ["x must be a tensor", "None"]),
    (ALL, {"x": [1.0]}, TypeError, ["x must be a tensor", "[1.0]", "list"]),
    (ALL, {"weight": None}, TypeError, ["weight must be a tensor", "None"]),
    (ALL, {"weight": 3.5}, TypeError, ["weight must be a tensor", "3.5"]),
    (ALL, {"bias": 1}, TypeError, ["bias must be a tensor", "1", "int"]),
    (STEP, {"state": "past"}, TypeError, ["state must be a tensor", "'past'"]),
    (ALL, {"x": torch.ones(T, B, C, dtype=torch.int64)}, TypeError, ["x must", ALLOWED_TYPES, "torch.int64"]),
    (ALL, {"x": torch.ones(T, B, C, dtype=torch.complex64)}, TypeError, ["x must", ALLOWED_TYPES, "torch.complex64"]),
    (ALL, {"weight": torch.ones(H, K, dtype=torch.bool)}, TypeError, ["weight must", ALLOWED_TYPES, "torch.bool"]),
    (ALL, {"x": torch.ones(T, B, C).half()}, TypeError, ["weight must have x's dtype torch.float16", "torch.float32"]),
    (ALL, {"bias": torch.ones(C).double()}, TypeError, ["bias must have x's dtype torch.float32", "torch.float64"]),
    (STEP, {"state": torch.ones(1, B, C).bfloat16()}, TypeError, ["state must have x's dtype", "torch.bfloat16"]),
    (FULL, {"padding_l": 1.0}, TypeError, ["padding_l must be an int", "1.0", "float"]),
    (FULL, {"padding_l": True}, TypeError, ["padding_l must be an int", "True", "bool"]),
    (FULL, {"padding_l": None}, TypeError, ["padding_l must be an int", "None"]),
    (ALL, {"normalize": None}, TypeError, ["normalize must be a str", "None"]),
    (ALL, {"dropout": "0.1"}, TypeError, ["dropout must be a float", "'0.1'"]),
    (ALL, {"dropout": True}, TypeError, ["dropout must be a float", "True", "bool"]),
    (ALL, {"dropout": None}, TypeError, ["dropout must be a float", "None"]),
    (ALL, {"glu": 1}, TypeError, ["glu must be a bool", "1", "int"]),
    (DYNAMIC, {"renorm_padding": None}, TypeError, ["renorm_padding must be a bool", "None"]),
    (FULL, {"lengths": [4, 2, 1]}, TypeError, ["lengths must be a tensor", "[4, 2, 1]"]),
    (FULL, {"lengths": torch.ones(B)}, TypeError, ["lengths must", "torch.int32, torch.int64", "torch.float32"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T])}, TypeError, ["cu_seqlens must", "torch.int32", "torch.int64"]),
    (ALL, {"x": torch.ones(T, B, C).to_sparse()}, TypeError, ["x must be a dense tensor", "layout torch.sparse_coo"]),
    (ALL, {"x": nested(T, B, C)}, TypeError, ["x must be a dense tensor, got a nested tensor"]),
    (ALL, {"x": nested(T, B, C, layout=torch.jagged)}, TypeError, ["x must be a dense tensor, got a nested tensor"]),
    (ALL, {"weight": torch.ones(H, K).to_sparse()}, TypeError, ["weight must be a dense tensor", "torch.sparse_coo"]),
    (ALL, {"bias": torch.ones(C).to_sparse()}, TypeError, ["bias must be a dense tensor", "torch.sparse_coo"]),
    (STEP, {"state": torch.ones(1, B, C).to_sparse()}, TypeError, ["state must be a dense tensor", "sparse_coo"]),
    (FULL, {"lengths": torch.ones(B).long().to_sparse()}, TypeError, ["lengths must be a dense tensor", "sparse_coo"]),
    # shapes
    (ALL, {"x": torch.randn(T, C)}, ValueError, ["x must have three dimensions (T, B, C)", f"({T}, {C})"]),
    (ALL, {"x": torch.randn(0, B, C)}, ValueError, ["x must have at least one time step", f"(0, {B}, {C})"]),
    (ALL, {"x": torch.randn(T, B, 0)}, ValueError, ["x must have", "at least one", "one channel", f"({T}, {B}, 0)"]),
    (ALL, {"x": torch.randn(T, B, 7), "glu": True}, ValueError, ["x must have an even", "2C", f"({T}, {B}, 7)"]),
    (
        ALL,
        {"x": torch.randn(T, C), "glu": True},
        ValueError,
        ["x must have three dimensions (T, B, 2C)", f"({T}, {C})"],
    ),
    (ALL, {"x": torch.randn(T, B, 7)}, ValueError, ["weight must have", "H that divides C = 7", "got H = 2"]),
    (ALL, {"x": torch.randn(T, B, C), "glu": True}, ValueError, ["weight must have", "H that divides C = 3", "H = 2"]),
    (("lightconv", "lightconv_step"), {"weight": torch.randn(H, 1, K)}, ValueError, ["(H, K)", f"({H}, 1, {K})"]),
    (("lightconv",), {"weight": torch.randn(H, 0)}, ValueError, ["weight must have at least one", f"({H}, 0)"]),
    (("lightconv",), {"weight": torch.randn(0, K)}, ValueError, ["weight must have at least one", f"(0, {K})"]),
    (DYNAMIC, {"weight": torch.randn(H, K)}, ValueError, ["(T, B, H, K)", f"T = {T}", f"B = {B}", f"got ({H}, {K})"]),
    (DYNAMIC, {"weight": torch.randn(T + 1, B, H, K)}, ValueError, ["(T, B, H, K)", f"T = {T}", f"({T + 1}, {B}"]),
    (DYNAMIC, {"weight": torch.randn(T, 1, H, K)}, ValueError, ["(T, B, H, K)", f"B = {B}", f"({T}, 1, {H}, {K})"]),
    (ALL, {"bias": torch.randn(C + 1)}, ValueError, [f"bias must have shape (C,) = ({C},)", f"got ({C + 1},)"]),
    (ALL, {"bias": torch.randn(1, C)}, ValueError, [f"bias must have shape (C,) = ({C},)", f"got (1, {C})"]),
    (STEP, {"state": torch.randn(K, B, C)}, ValueError, ["state must", f"0 to K-1 = {K - 1}", f"got ({K}, {B}, {C})"]),
    (STEP, {"state": torch.randn(2, B + 1, C)}, ValueError, ["state must", f"{B}, {C}", f"(2, {B + 1}, {C})"]),
    (STEP, {"state": torch.randn(2, B, 2 * C)}, ValueError, ["state must", f"{B}, {C}", f"(2, {B}, {2 * C})"]),
    (STEP, {"state": torch.randn(2, C)}, ValueError, ["state must", "(r, B, C)", f"got (2, {C})"]),
    (FULL, {"lengths": torch.tensor([4, 2])}, ValueError, [f"lengths must have shape (B,) = ({B},)", "got (2,)"]),
    (FULL, {"lengths": torch.tensor([[4, 2, 1]])}, ValueError, ["lengths must have shape (B,)", "got (1, 3)"]),
    (FULL, {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32)}, ValueError, ["cu_seqlens", "B = 1", f"({T}, {B}"]),
    # values
    (FULL, {"padding_l": -1}, ValueError, ["padding_l must satisfy 0 <= padding_l < K = 5", "got -1"]),
    (FULL, {"padding_l": K}, ValueError, ["padding_l must satisfy 0 <= padding_l < K = 5", "got 5"]),
    (ALL, {"normalize": "softmin"}, ValueError, ["normalize must be one of softmax, none, l2", "got 'softmin'"]),
    (ALL, {"dropout": 1.0}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got 1.0"]),
    (ALL, {"dropout": -0.1}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got -0.1"]),
    (ALL, {"dropout": math.nan}, ValueError, ["dropout must satisfy 0 <= dropout < 1", "got nan"]),
    (FULL, {"lengths": torch.tensor([4, 5, 1])}, ValueError, ["lengths must lie in 0 to T = 4", "got 1 to 5"]),
    (FULL, {"lengths": torch.tensor([4, -1, 1])}, ValueError, ["lengths must lie in 0 to T = 4", "got -1 to 4"]),
    # devices
    (ALL, {"weight": torch.empty(H, K, device="meta")}, ValueError, ["weight must be on x's device cpu", "got meta"]),
    (ALL, {"bias": torch.empty(C, device="meta")}, ValueError, ["bias must be on x's device cpu", "got meta"]),
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
    x, weight = torch.randn(6, 1, C), torch.randn((H, K) if operator == "lightconv" else (6, 1, H, K))
    with pytest.raises(ValueError, match=re.escape("cu_seqlens")) as caught:
        getattr(ops, operator)(x, weight, 2, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize("operator", FULL)
def test_padded_and_packed_exclude_each_other(operator):
    x, weight = torch.randn(6, 1, C), torch.randn((H, K) if operator == "lightconv" else (6, 1, H, K))
    with pytest.raises(ValueError, match="lengths and cu_seqlens must not be given together"):
        getattr(ops, operator)(
            x, weight, 2, lengths=torch.tensor([6]), cu_seqlens=torch.tensor([0, 6], dtype=torch.int32)
        )


@pytest.mark.parametrize("operator", FULL)
def test_padding_l_is_required(operator):
    arguments = valid(operator)
    del arguments["padding_l"]
    with pytest.raises(TypeError, match="padding_l"):
        getattr(ops, operator)(**arguments)


@pytest.mark.parametrize("operator", ["lightconv", "lightconv_step"])
def test_renorm_padding_is_refused_where_it_means_nothing(operator):
    with pytest.raises(TypeError, match="renorm_padding"):
        getattr(ops, operator)(**valid(operator), renorm_padding=True)
