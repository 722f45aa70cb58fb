"""Every mixer's step: with dropout on or off, in any chunks, and what its state may share with other tensors."""

import pytest
import torch

from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules.attention import AttentionConv
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.mixers import MixerSpec, build_mixer

DIM = 8
CONVOLVED = {f"{kind}-convolved": AttentionConv(("q", "k", "v")) for kind in ("attention", "window_attention")}
NAMES = [*MIXERS, *CONVOLVED]


def mixer(name, dropout=0.0, kernel_size=3):
    torch.manual_seed(1)
    spec = MixerSpec(
        kind=name.removesuffix("-convolved"),
        kernel_size=kernel_size,
        conv_dim=DIM,
        num_heads=2,
        glu=name != "talk",
        input_dropout=dropout,
        weight_dropout=dropout,
        normalize="softmax",
        attention_dropout=dropout,
        causal=True,
        attention_conv=CONVOLVED.get(name),
    )
    return build_mixer(spec, DIM)


def tensors(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


def steps(module, x, chunks, pads=None):
    state, out = None, []
    for number, piece in enumerate(x.split(chunks)):
        begin = sum(chunks[:number])
        y, state = module.step(piece, state, None if pads is None else pads[:, begin : begin + len(piece)])
        out.append(y)
    return torch.cat(out)


@pytest.mark.parametrize("retained", [False, True], ids=["training", "retained"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_dropout_is_the_full_pass_with_the_same_masks(name, retained):
    module, x = mixer(name, dropout=0.6).train(not retained), torch.randn(13, 3, DIM)
    for child in module.modules():
        if isinstance(child, Dropout):
            child.apply_during_inference = retained
    torch.manual_seed(2)
    full = module(x)
    torch.manual_seed(2)
    out, state = module.step(x, None)
    torch.testing.assert_close(out, full, rtol=1e-4, atol=1e-5)
    assert not torch.equal(module(x), full)
    for piece in torch.randn(4, 1, 3, DIM):
        out, state = module.step(piece, state)
        assert out.isfinite().all()


@pytest.mark.parametrize("kernel_size, chunks", [(3, [1] * 13), (1, [4, 1, 8]), (15, [2, 2, 9]), (7, [13])], ids=str)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_chunks_without_masks_and_with_those_that_depend_on_no_position(name, kernel_size, chunks, monkeypatch):
    # A mask may differ from chunk to chunk; with one that does not, chunks have to equal the full pass.
    module, x = mixer(name, 0.6, kernel_size).eval(), torch.randn(13, 3, DIM)
    if name == "talk":
        module.conv.offsets.bias[0] = 9  # windows as long as may be, of one head
    torch.testing.assert_close(steps(module, x, chunks), module(x), rtol=1e-4, atol=1e-5)
    for child in module.modules():
        if isinstance(child, Dropout) and child.module_name == "TaLKConv":
            child.apply_during_inference = True
    kept = torch.rand(3, 2).gt(0.4) / 0.4
    monkeypatch.setattr(Dropout, "forward", lambda self, x: x * kept if self.module_name == "TaLKConv" else x)
    torch.testing.assert_close(steps(module, x, chunks), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_state_shares_no_memory_with_the_arguments(name, training):
    module = mixer(name, dropout=0.6).train(training)
    for masked in (False, True):
        before = None
        for tokens in (4, 1):
            x, pads = torch.randn(tokens, 3, DIM), torch.zeros(3, tokens, dtype=torch.bool) if masked else None
            _, state = module.step(x, before, pads)
            given = [x, *([pads] if masked else []), *([] if before is None else tensors(before))]
            assert not addresses(given) & addresses(tensors(state))
            before = state


def addresses(parts):
    return {part.untyped_storage().data_ptr() for part in parts}


@torch.no_grad()
def test_steps_of_attention_compile_in_one_graph():
    torch._dynamo.reset()
    module, x = mixer("attention-convolved").eval(), torch.randn(2, 3, DIM)
    step, state = torch.compile(module.step, fullgraph=True, backend="eager"), None
    for piece, expected in zip(x.split(1), module(x).split(1), strict=True):
        out, state = step(piece, state)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
