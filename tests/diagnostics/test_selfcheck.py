"""The self-check of `lightconv doctor`: its expectations, and that it finds operators that are wrong."""

import itertools
import json
import math

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.cli import main
from lightconv_plugin.diagnostics import checks, explain, selfcheck
from lightconv_plugin.ops import backends, reference
from tests.diagnostics.findings import statuses


@pytest.mark.parametrize("padding_l", [0, 2, 3, 6])
def test_the_expectation_is_right(padding_l):
    x, logits = torch.randn(6, 2, 12, dtype=torch.float64), torch.randn(6, 2, 3, 7, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, padding_l, 6 - padding_l))
    windows = padded.unfold(0, 7, 1).unflatten(2, (3, 4))
    want = (windows * logits.softmax(dim=-1).unsqueeze(3)).sum(dim=-1).flatten(2)
    torch.testing.assert_close(selfcheck.convolution(x, logits, padding_l), want)


@pytest.mark.parametrize("causal", [False, True])
def test_the_expectation_of_talkconv_is_right(causal):
    """The band of shares, clip(reach − distance + 1, 0, 1)."""
    x, reach = torch.randn(6, 2, 12, dtype=torch.float64), 4
    left, right = (1.5 * torch.rand(6, 2, 3, dtype=torch.float64) for _ in range(2))
    distance = torch.arange(6) - torch.arange(6).view(6, 1, 1, 1)  # (T, 1, 1, T): how far to the right of t
    band = (left.unsqueeze(-1) * reach + distance + 1).clamp(0, 1) * (distance < 0) + (distance == 0)
    if not causal:
        band = band + (right.unsqueeze(-1) * reach - distance + 1).clamp(0, 1) * (distance > 0)
    band = band / (reach * (1 if causal else 2) + 1)
    want = torch.einsum("tbhs,sbhr->tbhr", band, x.unflatten(2, (3, 4))).flatten(2)
    torch.testing.assert_close(selfcheck.talk(x, left, None if causal else right, reach), want)


class Backward(torch.autograd.Function):
    """The identity with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def spoiled(operator, how):
    def call(*arguments, **options):
        result = operator(*arguments, **options)
        return (how(result[0]), result[1]) if isinstance(result, tuple) else how(result)

    return call


def whole(name):
    """The operator of selfcheck.OPERATORS whose part this is."""
    return name if name in selfcheck.OPERATORS else name.removesuffix("_step")


def raising(value):
    raise RuntimeError("the kernel\nhas a fault")


WRONG = {
    "value": (lambda out: out * 1.01, "differ from float64 by up to"),
    "nan": (lambda out: out * torch.nan, "differ from float64 by up to inf"),
    "shape": (lambda out: out[..., :-1], "shape"),
    "error": (raising, "RuntimeError: the kernel has a fault"),
}


@pytest.mark.parametrize(
    "operator, wrong",
    [
        *((name, "value") for name in ops.__all__ if whole(name) in selfcheck.OPERATORS),
        *((name, wrong) for name in ("lightconv", "dynamicconv_step") for wrong in WRONG if wrong != "value"),
    ],
)
def test_a_wrong_operator_is_found(operator, wrong, no_fairseq, monkeypatch, capsys):
    how, said = WRONG[wrong]
    monkeypatch.setattr(ops, operator, spoiled(getattr(ops, operator), how))
    assert main.main(["doctor"]) == 1
    name = whole(operator)
    out = capsys.readouterr().out
    failures = [line for line in out.splitlines() if line.startswith("failure")]
    assert failures[0].startswith(f"failure  {name} on cpu, float32: ")
    assert said in failures[0]
    assert {line.split()[1] for line in failures} == {name}
    assert "-> please report this" in out


def test_the_json_about_a_nan_has_null(no_fairseq, monkeypatch, capsys):
    """JSON knows neither NaN nor Infinity, which Python writes and reads."""
    monkeypatch.setattr(ops, "lightconv", spoiled(ops.lightconv, WRONG["nan"][0]))
    assert main.main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["self_check"]["lightconv on cpu, float32"] is None
    assert said["against_reference"]["lightconv on cpu, float32"] < 1e-5


@pytest.mark.parametrize("operator", selfcheck.DIFFERENTIABLE)
def test_a_wrong_gradient_is_found(operator, no_fairseq, monkeypatch):
    monkeypatch.setattr(ops, operator, spoiled(getattr(ops, operator), Backward.apply))
    assert f"{operator} on cpu, float32" in statuses(checks.examine(), checks.FAILURE)


@pytest.mark.parametrize(
    "operator, wrong",
    [*((name, 1.01) for name in backends.OPERATORS), ("lightconv", math.nan), ("dynamicconv_step", math.nan)],
)
def test_a_kernel_that_differs_from_the_reference_is_found(operator, wrong, no_fairseq, monkeypatch):
    if backends.backend("cpu") == "reference":
        pytest.skip(backends.decision("cpu").reason)

    def spoil(result):
        return tuple(map(spoil, result)) if isinstance(result, tuple) else result * wrong

    computed = getattr(reference, operator)
    monkeypatch.setattr(reference, operator, lambda *arguments: spoil(computed(*arguments)))
    (name,) = (name for name in selfcheck.OPERATORS if name.startswith(operator.partition("_")[0]))
    found = statuses(checks.examine(), checks.FAILURE)[f"{name} on cpu, float32"]
    assert "with all options from the reference by up to" in found.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_path_of_the_kernels_is_checked(dtype, monkeypatch):
    if backends.backend("cpu") == "reference":
        pytest.skip(backends.decision("cpu").reason)
    like, seen, wanted = torch.empty(0, dtype=dtype), set(), {("talkconv_step", "one by one")}

    def record(module, operator):
        call = getattr(module, operator)

        def recorded(*arguments):
            result = call(*arguments)
            seen.add((operator, torch.ops.lightconv.last_path(like)))
            return result

        monkeypatch.setattr(module, operator, recorded)

    record(ops, "talkconv_step")
    selfcheck.operator_error("talkconv", torch.device("cpu"), dtype)
    for name in explain.OPERATORS:
        for operator in (name, f"{name}_backward"):
            record(reference, operator)  # which the self-check calls after the kernel
            for per_head, size in itertools.product((1, 2, 3, 4, 8, 16, 64), (1, 3, 7, 16, 17, 31)):
                path = torch.ops.lightconv.explain(like, name, operator != name, per_head, 1, size).splitlines()[-1]
                wanted.add((operator, path.split("\t")[0]))
        selfcheck.reference_error(name, torch.device("cpu"), dtype)
    assert seen >= wanted


def test_a_decoder_that_looks_ahead_is_found(monkeypatch):
    pytest.importorskip("fairseq")
    monkeypatch.setattr(ops, "dynamicconv_step", spoiled(ops.dynamicconv_step, lambda out: out * 1.5))
    assert selfcheck.decoding_error() > 1e-3
