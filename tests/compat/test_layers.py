"""fairseq's own layers: any mixer in the encoder layer, swish, and no uninitialised number in a checkpoint."""

import pickle
from importlib import metadata

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.modules import AdaptiveInput, AdaptiveSoftmax, SinusoidalPositionalEmbedding
from fairseq.modules.dynamic_crf_layer import DynamicCRF

import lightconv_plugin.models  # noqa: F401 (the patches)
from tests import programs
from tests.compat.fairseq_runs import is_applied
from tests.warm_python import warm_python


def test_encoder_layer_takes_any_mixer_and_holds_no_copies():
    """encoder_layer_copies: the layer of fairseq 0.12.2 is that of the others, and loads what it wrote itself."""
    from fairseq.models.transformer import TransformerConfig
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    class Layer(TransformerEncoderLayerBase):
        def build_self_attention(self, embed_dim, cfg):
            return torch.nn.Identity()

    config = TransformerConfig()
    config.encoder.embed_dim, config.encoder.ffn_embed_dim = 8, 12
    layer = Layer(config)
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
    assert not vars(layer.self_attn).keys() & {"q_proj", "out_proj"}
    assert "build_self_attention" not in vars(layer)
    if not is_applied("encoder_layer_copies"):
        pytest.skip("fairseq-fixed's layer: no copies, and it reads none")
    stored = {**layer.state_dict(), "fc1_weight": layer.fc1.weight, "in_proj_bias": torch.zeros(24)}
    layer.load_state_dict(stored, strict=True)
    with pytest.raises(RuntimeError, match="surprise"):
        layer.load_state_dict({**stored, "surprise": torch.zeros(1)}, strict=True)


SWISH = """
import torch, lightconv_plugin
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
config = TransformerConfig(activation_fn="swish")
config.encoder.embed_dim, config.encoder.ffn_embed_dim, config.encoder.attention_heads = 8, 12, 2
layer = TransformerEncoderLayerBase(config).eval()
x = torch.randn(5, 2, 8)
out = layer(x, None)
layer.activation_fn = lambda h: h * torch.sigmoid(h)
torch.testing.assert_close(out, layer(x, None))
"""


@pytest.mark.parametrize("skipped", ["", "swish_activation"])
def test_swish_is_a_function(skipped):
    """In fairseq's own layer; without the patch it makes a module of its input."""
    result = programs.run(warm_python(), "-c", SWISH, status=None, LIGHTCONV_SKIP_PATCHES=skipped)
    assert (result.returncode == 0) == (not skipped or not is_applied("swish_activation")), result.stderr[-2000:]


def test_no_uninitialised_number_is_saved():
    """uninitialised_markers: memory may hold NaN, as a saved state does here; fairseq-fixed saves no positions."""
    old = metadata.packages_distributions()["fairseq"] == ["fairseq"]
    for _ in range(20):
        torch.full((1,), float("nan"))
        positions = SinusoidalPositionalEmbedding(8, 1, 16)
        assert list(positions.state_dict()) == (["_float_tensor"] if old else [])
        positions.load_state_dict({key: torch.full((1,), float("nan")) for key in positions.state_dict()})
        assert all(torch.equal(value, torch.zeros(1)) for value in positions.state_dict().values())
    assert pickle.loads(pickle.dumps(positions)) is not None


def test_adaptive_inputs_and_tied_outputs_save_no_uninitialised_number():
    """uninitialised_markers: the same of adaptive inputs, and softmax with their weights, with every fairseq."""
    for _ in range(20):
        torch.full((1,), float("nan"))
        inputs = AdaptiveInput(12, 0, 8, 2.0, 8, [4, 12])
        outputs = AdaptiveSoftmax(12, 8, [4, 12], 0.0, 2.0, adaptive_inputs=inputs)
        for module, marker in ((inputs, "_float_tensor"), (outputs, "head._float_tensor")):
            assert torch.equal(module.state_dict()[marker], torch.zeros(1))
            module.load_state_dict({**module.state_dict(), marker: torch.full((1,), float("nan"))})
            assert torch.equal(module.state_dict()[marker], torch.zeros(1))


@pytest.mark.skipif(not hasattr(torch.backends.cuda, "cudnn_sdp_enabled"), reason="this torch has no cuDNN attention")
@pytest.mark.parametrize("skipped", ["", "attention_without_cudnn"])
def test_attention_is_not_cudnns(skipped):
    """In a process of its own, since the setting is torch's and lasts."""
    code = "import torch, lightconv_plugin.models; print(torch.backends.cuda.cudnn_sdp_enabled())"
    result = programs.run(warm_python(), "-c", code, LIGHTCONV_SKIP_PATCHES=skipped)
    assert result.stdout.split()[-1:] == [str(bool(skipped))]


def test_the_crf_of_fairseq_normalises_with_numpy_float():
    """numpy_float: with a beam of all words, the sum over all sequences, as by writing them out."""
    torch.manual_seed(1)
    crf, emissions, mask = DynamicCRF(5, low_rank=4, beam_size=5), torch.randn(1, 3, 5), torch.ones(1, 3, dtype=bool)
    sequences = torch.cartesian_prod(*[torch.arange(5)] * 3)
    expected = crf._compute_score(emissions.expand(125, -1, -1), sequences, None).log_softmax(dim=0)
    found = [crf(emissions, sequence[None], mask) for sequence in sequences[:7]]
    torch.testing.assert_close(torch.cat(found), expected[:7])
