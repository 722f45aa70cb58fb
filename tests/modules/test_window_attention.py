"""Attention in a window: fairseq's own attention where the window is wide, a plain softmax over it where it is not."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.modules import MultiheadAttention

from lightconv_plugin.models.token_mixers import WindowAttention


def attention(left: int, right: int, **options) -> WindowAttention:
    return WindowAttention(24, 4, left=left, right=right, **options).eval()


def plain(module: WindowAttention, x: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
    """Token by token and head by head, over the visible keys only; (T,B,d), defined where there is a word."""
    q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    out = torch.zeros_like(x)
    for b in range(x.shape[1]):
        for t in range(x.shape[0]):
            seen = [s for s in range(x.shape[0]) if t - module.left <= s <= t + module.right and not pads[b, s]]
            for h in range(0, 24, 6):
                scores = k[seen, b, h : h + 6] @ q[t, b, h : h + 6] / 6**0.5
                out[t, b, h : h + 6] = scores.softmax(0) @ v[seen, b, h : h + 6] if seen else 0
    return module.out_proj(out)


@torch.no_grad()
def test_a_window_over_everything_is_fairseqs_attention():
    """With its parameters, under its names."""
    theirs = MultiheadAttention(24, 4, self_attention=True).eval()
    ours = attention(20, 20)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(9, 3, 24)
    pads = torch.zeros(3, 9, dtype=torch.bool)
    pads[1, 5:] = pads[2, :4] = True
    words = ~pads.t()
    torch.testing.assert_close(
        ours(x, x, x, key_padding_mask=pads)[0][words], theirs(x, x, x, key_padding_mask=pads)[0][words]
    )


@pytest.mark.parametrize("left, right", [(0, 0), (1, 1), (3, 0), (2, 3), (30, 0)])
@torch.no_grad()
def test_only_the_window_is_seen(left, right):
    module = attention(left, right)
    x = torch.randn(9, 3, 24)
    pads = torch.zeros(3, 9, dtype=torch.bool)
    pads[1, 5:] = pads[2, :4] = True
    words = ~pads.t()
    out = module(x, x, x, key_padding_mask=pads)[0]
    assert out.isfinite().all()
    torch.testing.assert_close(out[words], plain(module, x, pads)[words], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 6], [11], [2, 2, 7]])
@pytest.mark.parametrize("left", [0, 2, 40])
@torch.no_grad()
def test_decoding_in_chunks_with_a_bounded_state(left, chunks):
    module = attention(left, 0)
    x = torch.randn(11, 3, 24)
    pads = torch.zeros(3, 11, dtype=torch.bool)
    pads[2, :3] = True
    state, out, start = {}, [], 0
    for n in chunks:
        piece = slice(start, start + n)
        out.append(module(x[piece], key_padding_mask=pads[:, piece], incremental_state=state)[0])
        start += n
        kept = module._get_input_buffer(state)["mixer_state"][0].shape[2]
        assert kept == min(start, left)
    words = ~pads.t()
    whole = module(x, key_padding_mask=pads)[0]
    torch.testing.assert_close(torch.cat(out)[words], whole[words], atol=1e-6, rtol=1e-5)


def test_dropout_of_its_weights_is_on_in_training_only():
    module = WindowAttention(24, 4, left=3, right=3, dropout=0.5)
    x = torch.randn(9, 2, 24)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
