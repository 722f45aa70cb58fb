"""fairseq's optimizer with few launches: the same numbers."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq import utils
from fairseq.optim.adam import Adam
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin as Mixin
from fairseq.optim.nag import NAG, FairseqNAG

import lightconv_plugin.models  # noqa: F401 (the patches)
from benchmarks.launches import Counter
from lightconv_plugin.compat import optimizing
from tests import programs
from tests.warm_python import warm_python

COUNT = 40  # parameters
FAIRSEQS_STEP = inspect.unwrap(Adam.step)  # the patch wraps it, and torch wraps both


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (), (2, 3, 4)]
    return [torch.nn.Parameter(torch.randn(shapes[i % 4], generator=generator).to(dtype)) for i in range(COUNT)]


def draw_gradients(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    for number, tensor in enumerate(tensors):
        # One never has a gradient, and one not at first.
        if number != 5 and (number != 6 or seed > 1):
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def fused(optimizer):
    """What Adam.step does on a GPU, on any device."""
    for group in optimizer.param_groups:
        tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
        states = [optimizing._state(optimizer.state[tensor], tensor) for tensor in tensors]
        optimizing.fused_adam(group, tensors, states)


def steps(step, tensors, count=5, **options):
    optimizer = Adam(tensors, lr=0.01, **options)
    for seed in range(count):
        draw_gradients(tensors, seed)
        optimizer.param_groups[0]["lr"] = 0.01 / (seed + 1)
        step(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "betas": (0.9, 0.98)}, {"eps": 1e-3}], ids=["plain", "decay", "eps"]
)
def test_fused_adam_is_fairseqs(options):
    """Over 100 updates, as close to the formula in float64 as fairseq's own in float32."""
    ours, theirs = (steps(step, parameters(), 100, **options) for step in (fused, FAIRSEQS_STEP))
    exact = steps(
        FAIRSEQS_STEP, [torch.nn.Parameter(tensor.detach().double()) for tensor in parameters()], 100, **options
    )
    for one, other, formula in zip(
        *(optimizer.param_groups[0]["params"] for optimizer in (ours, theirs, exact)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.double(), formula, rtol=2e-6, atol=2e-6)
        assert ours.state[one].keys() == theirs.state[other].keys()
        for name, value in theirs.state[other].items():
            torch.testing.assert_close(
                torch.as_tensor(ours.state[one][name]), torch.as_tensor(value), rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("case", ["amsgrad", "bfloat16", "float64"])
def test_adam_that_torch_does_not_fuse_is_fairseqs_to_the_bit(case):
    dtype = getattr(torch, case, torch.float32)
    ours, theirs = (steps(step, parameters(dtype), amsgrad=case == "amsgrad") for step in (Adam.step, FAIRSEQS_STEP))
    for one, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("turned", ["parameter", "gradient", "state", "all", "type"])
def test_adam_with_any_layout_and_a_state_of_another_type(turned):
    """On a CPU, torch's kernels pair the elements as they are in memory."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(3, 4, 6, generator=generator)
    results = []
    for step in (Adam.step, FAIRSEQS_STEP):
        weight, *others = (
            plain.transpose(0, 2).contiguous().transpose(0, 2) if turned in (name, "all") else plain.clone()
            for name in ("parameter", "gradient", "state", "state")
        )
        optimizer = Adam([torch.nn.Parameter(weight)], lr=0.1)
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = others[0]
        if turned == "type":
            others = [others[0], others[1].double(), others[2].double()]
        optimizer.state[parameter] = {"step": 1, "exp_avg": others[1], "exp_avg_sq": others[2].square()}
        for _ in range(2):
            step(optimizer)
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (9,), ()], ids=str)
def test_adam_with_the_state_of_another_parameter(shape):
    (parameter,) = tensors = [torch.nn.Parameter(torch.zeros(3, 3))]
    parameter.grad = torch.ones(3, 3)
    optimizer = Adam(tensors)
    optimizer.state[parameter] = {"step": 1, "exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(shape)}
    with pytest.raises(RuntimeError, match=r"exp_avg_sq of shape .* must match the size of its parameter"):
        optimizer.step()
    assert not parameter.any()


def test_adam_on_a_cpu_passes_over_the_memory_once():
    """Without adam_launches: eleven operations for each parameter."""
    counts = []
    for step in (Adam.step, FAIRSEQS_STEP):
        tensors = parameters()
        optimizer = Adam(tensors)
        for seed in range(2):
            draw_gradients(tensors, seed)
            with Counter("cpu") as counter:
                step(optimizer)
        counts.append(counter.counts.launches.total())
    assert counts[0] <= 4 and counts[1] >= 7 * (COUNT - 2)


def test_adam_launches_as_much_for_many_parameters_as_for_one():
    """Without adam_launches: seven times for each parameter."""
    counts = []
    for step in (Adam.step, FAIRSEQS_STEP):
        tensors = [torch.nn.Parameter(tensor.detach().to("meta")) for tensor in parameters()]
        optimizer = Adam(tensors)
        for _ in range(2):  # the first makes the state
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)
            with Counter() as counter:
                step(optimizer)
        counts.append(counter.counts.launches.total())
    assert counts[0] <= 2 and counts[1] >= 7 * COUNT


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_adam_updates_with_the_gradients_of_the_closure(device):
    tensors = [torch.nn.Parameter(tensor.detach().to(device)) for tensor in parameters()]
    optimizer = Adam(tensors)

    def closure():
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        return 7

    with Counter():
        assert optimizer.step(closure) == 7
    assert len(optimizer.state) == COUNT and all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_the_gradients_norm(limit, dtype, monkeypatch):
    """Without gradient_norm_launches (fairseq 0.12.2: and gradient_clipping_launches): a launch for each parameter."""
    results = []
    for together in (True, False):
        monkeypatch.setattr(utils, "multi_tensor_l2norm_available", together)
        tensors = parameters(dtype)
        draw_gradients(tensors, 3)
        with Counter("cpu") as counter:
            norm = utils.clip_grad_norm_(tensors, limit)
        results.append((norm, [tensor.grad for tensor in tensors], counter.counts.launches.total()))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].dtype == torch.float32
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert one is other is None or torch.equal(one, other)
    assert results[0][2] < 12 and results[1][2] > COUNT


class HalfPrecision(Mixin):
    """What fairseq's FP16Optimizer is made of, with its copies in one piece or not."""

    def __init__(self, flat, dtype):
        self.fp16_params = parameters(dtype)
        self.scaler, self._needs_sync, self._multiply_factor = SimpleNamespace(loss_scale=4), True, 1.0
        full = [torch.nn.Parameter(half.data.float()) for half in self.fp16_params]
        if flat:
            piece = torch.nn.Parameter(torch.cat([tensor.data.view(-1) for tensor in full]))
            piece.grad = torch.full_like(piece, 3)
            full = {None: piece}
        self.fp32_params = full

    @property
    def everything(self):
        full = self.fp32_params.values() if self.has_flat_params else self.fp32_params
        kept = [tensor for one in full for tensor in (one.data, one.grad)]
        return [*kept, *self.fp16_params, *(half.grad for half in self.fp16_params)]

    def train(self):
        """Two updates' copies and clearings, up to the gradients of a third; the operators that they take."""
        count = 0
        for seed in range(3):
            draw_gradients(self.fp16_params, seed)
            self._needs_sync = True
            with Counter("cpu") as counter:
                self._sync_fp16_grads_to_fp32()
                for full in self.fp32_params.values() if self.has_flat_params else self.fp32_params:
                    full.data += 0.1 * full.grad
                self._sync_fp32_params_to_fp16()
                if seed < 2:
                    self.zero_grad()
            count += counter.counts.launches.total()
        assert not self._needs_sync and self._multiply_factor == 0.25
        return count


SCRIPT = """
import sys, torch
import lightconv_plugin.models
from tests.compat.test_optimizing import HalfPrecision
results = []
for flat in (False, True):
    for dtype in (torch.float16, torch.bfloat16):
        optimizer = HalfPrecision(flat, dtype)
        results.append((optimizer.train(), optimizer.everything))
torch.save(results, sys.argv[1])
"""


def test_copies_of_half_precision(tmp_path):
    """Without half_precision_launches: the same bits, by operators for each parameter."""
    found = {}
    for skipped in ("", "half_precision_launches"):
        file = tmp_path / f"without {skipped}.pt"
        programs.run(warm_python(), "-c", SCRIPT, file, OMP_NUM_THREADS=1, LIGHTCONV_SKIP_PATCHES=skipped)
        found[skipped] = torch.load(file, weights_only=True)
    for (count, ours), (their_count, theirs) in zip(*found.values(), strict=True):
        assert their_count > 150 + count
        for one, other in zip(ours, theirs, strict=True):
            assert one is other is None or torch.equal(one, other)


# ------------------------------------------------------------------------------------------------ --amp

SCALE = 1024.0


def with_loss_scale(monkeypatch, **common):
    """A parameter, and fairseq's optimizer of it with a loss scale that also works on a CPU."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda **options: scaler("cpu", **options))
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    inner = FairseqNAG.__new__(FairseqNAG)
    inner._optimizer = NAG([parameter], lr=0.1, momentum=0.9)
    settings = {"fp16_init_scale": SCALE, "min_loss_scale": 1e-4, "amp_init_scale": 128, "amp_scale_window": None}
    return parameter, AMPOptimizer(
        SimpleNamespace(optimizer=None, common=SimpleNamespace(**settings | common)), [], inner
    )


@pytest.mark.parametrize("limit", [None, 0.0, 0.5], ids=["no-norm", "no-clipping", "clipping"])
def test_gradients_are_unscaled_once(limit, monkeypatch):
    """Without amp_scales_once, they are divided by the loss scale again."""
    parameter, optimizer = with_loss_scale(monkeypatch)
    plain = torch.nn.Parameter(parameter.detach().clone())
    torchs = NAG([plain], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.backward(parameter.square().sum())
        plain.square().sum().backward()
        if limit is not None:
            norm = optimizer.clip_grad_norm(limit)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([plain], limit or torch.inf))
        optimizer.step()
        torchs.step()
        parameter.grad = plain.grad = None
        torch.testing.assert_close(parameter, plain)


def test_an_overflow_halves_the_scale_and_changes_nothing_else(monkeypatch):
    parameter, optimizer = with_loss_scale(monkeypatch)
    before = parameter.detach().clone()
    optimizer.backward((parameter * torch.inf).sum())
    assert not optimizer.clip_grad_norm(0.0).isfinite()
    optimizer.step()
    assert torch.equal(parameter, before) and optimizer.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("window, wanted", [(None, 2000), (3, 3)])
def test_the_scale_grows_after_its_window(window, wanted, monkeypatch):
    """Without amp_scales_once, after as many updates as --amp-init-scale says."""
    assert with_loss_scale(monkeypatch, amp_scale_window=window)[1].scaler.get_growth_interval() == wanted
