"""`lightconv doctor --explain`: the path that is named is the one that runs."""

import random

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.cli import main
from lightconv_plugin.diagnostics import explain
from lightconv_plugin.ops import backends


@pytest.fixture
def native():
    if backends.backend("cpu") != "cpu":
        pytest.skip("the CPU kernels are not in use")


def drawn(seed):
    """An operator, a type, and sizes on both sides of every limit."""
    rng = random.Random(seed)
    per_head, heads = rng.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 64)), rng.choice((1, 2, 5))
    sizes = (rng.choice((1, 3, 40)), rng.choice((1, 3)), heads * per_head, heads, rng.choice((1, 3, 16, 17, 31)))
    return rng.choice(explain.OPERATORS), rng.choice(explain.DTYPES), sizes


def paths_of(operator, dtype, sizes):
    """The paths that the forward and the backward pass of such a call take."""
    steps, batch, channels, heads, size = sizes
    like = torch.empty(0, dtype=getattr(torch, dtype))
    x = torch.randn(steps, batch, channels).to(like.dtype).requires_grad_()
    if operator == "talkconv":
        out = ops.talkconv(x, torch.rand(steps, batch, heads).to(x.dtype), None, size - 1, 0)
    else:
        shape = (heads, size) if operator == "lightconv" else (steps, batch, heads, size)
        weight = torch.randn(shape).to(x.dtype).requires_grad_()
        out = getattr(ops, operator)(x, weight, size - 1)
    forward = torch.ops.lightconv.last_path(like)
    out.sum().backward()
    return forward, torch.ops.lightconv.last_path(like)


def test_the_path_that_is_named_runs(native):
    seen = set()
    for seed in range(150):
        operator, dtype, sizes = drawn(seed)
        lines = explain.explain(sizes, operator, dtype).splitlines()
        for name, path in zip(("forward", "backward"), paths_of(operator, dtype, sizes), strict=True):
            (line,) = (line for line in lines if line.startswith(f"cpu {name}: "))
            assert line.removeprefix(f"cpu {name}: ").split(" (")[0] == path, (operator, dtype, sizes)
            seen.add((operator == "talkconv", name, path))
    paths = {False: ("walk", "depthwise", "band"), True: ("block sums",)}
    wanted = {(talk, name, path) for talk in paths for path in paths[talk] for name in ("forward", "backward")}
    assert seen == wanted | {(False, "backward", "tiles of rows")}


def test_a_step_of_few_tokens(native):
    like, x, offset = torch.empty(0), torch.randn(5, 1, 4), torch.rand(5, 1, 2)
    for tokens, path in ((4, "one by one"), (5, "block sums")):
        ops.talkconv_step(x[:tokens], None, offset[:tokens], 3)
        assert torch.ops.lightconv.last_path(like) == path


def test_says_why_not_the_paths_before(native):
    lines = explain.explain((30, 2, 64, 1, 31), "dynamicconv", "float32").splitlines()
    assert lines[0] == "dynamicconv, float32, T = 30, B = 2, C = 64, H = 1, K = 31 (C/H = 64)"
    assert lines[1] == "cpu forward: walk"
    assert "cpu backward: tiles of rows (not walk: that needs C/H >= " in lines[2]
    assert lines[2].endswith(", and K <= 16 for dynamicconv)")


def test_without_a_gpu_there_is_nothing_to_warn_of(native, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "_decided", {"cpu": backends.decision("cpu")})
    assert explain.explain((30, 2, 64, 1, 31), "dynamicconv", "float32").endswith("\ncuda: torch sees no CUDA device")
    assert not caplog.records


def test_the_command(native, capsys):
    assert (
        main.main(["doctor", "--explain", "9", "1", "8", "8", "3", "--operator", "lightconv", "--dtype", "bfloat16"])
        == 0
    )
    out = capsys.readouterr().out
    assert "lightconv, bfloat16, T = 9, B = 1, C = 8, H = 8, K = 3 (C/H = 1)\ncpu forward: depthwise (not walk: " in out


@pytest.mark.parametrize("option, value", [("--operator", "talkconv"), ("--dtype", "float32")])
def test_an_option_of_the_explanation_alone_is_refused(option, value, refusal):
    said = refusal("doctor", option, value)
    assert said == f"lightconv doctor: error: {option} belongs to --explain: give both or neither\n"


@pytest.mark.parametrize(
    "sizes, message",
    [
        ("9 1 8 3 3", "--explain: C must be a multiple of H, got C = 8 and H = 3"),
        ("9 0 8 2 3", "--explain: B must be at least 1, got 0"),
        ("9 1 8 2 -3", "--explain: K must be at least 1, got -3"),
    ],
)
def test_wrong_shapes(sizes, message, refusal):
    assert refusal("doctor", "--explain", *sizes.split()) == f"lightconv doctor: error: {message}\n"
