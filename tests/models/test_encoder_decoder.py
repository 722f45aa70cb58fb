"""What must hold of every model: decoding is teacher forcing, so causal; pads never leak; all parameters train."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.quantization_utils import quantize_model_scalar
from fairseq.sequence_generator import SequenceGenerator

from lightconv_plugin.models.token_mixers import RetainableDropout as Dropout
from lightconv_plugin.modules.linear import Linear

from .language_model_toys import build_lm
from .toys import VARIANTS, batch, build, dictionary, task

CONVOLUTIONS = ["lightweight", "dynamic", "talk", "gated_short", "depthwise", "conv"]
OURS = [*CONVOLUTIONS, *VARIANTS, "window_attention"]
MIXERS = [*CONVOLUTIONS, *VARIANTS, "attention", "window_attention", "lightweight,attention,dynamic"]


def of(mixer, **options):
    return build(encoder_conv_type=mixer, decoder_conv_type=mixer, **options)


@pytest.mark.parametrize("target_length, normalize_before", [(1, False), (3, True), (12, False)])  # kernels: 3, 5, 9
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_incremental_decoding_is_teacher_forcing(mixer, normalize_before, target_length):
    model = of(mixer, decoder_normalize_before=normalize_before, encoder_normalize_before=normalize_before)
    source, lengths, _ = batch()
    previous = torch.randint(4, 30, (3, target_length))
    encoded = model.encoder(source, lengths)
    whole, _ = model.decoder(previous, encoder_out=encoded)
    state = {}
    steps = [
        model.decoder(previous[:, : t + 1], encoder_out=encoded, incremental_state=state)[0]
        for t in range(target_length)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_beam_reorder(mixer):
    """After a reorder each row goes on as if it had always had the history of the row it was copied from.

    The rows are beams of one sentence: fairseq's attention over the encoder relies on it and is not reordered.
    """
    model = of(mixer)
    source, lengths, _ = batch((7, 7, 7))
    source = source[:1].expand(3, -1)
    previous = torch.randint(4, 30, (3, 12))
    order = torch.tensor([2, 0, 0])
    encoded = model.encoder(source, lengths)
    state = {}
    for t in range(6):
        model.decoder(previous[:, : t + 1], encoder_out=encoded, incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, order)
    previous = torch.cat([previous[order, :6], previous[:, 6:]], dim=1)
    steps = [model.decoder(previous[:, : t + 1], encoder_out=encoded, incremental_state=state)[0] for t in range(6, 12)]
    whole, _ = model.decoder(previous, encoder_out=encoded)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, 6:], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("left_pad_source", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_a_batch_equals_each_sentence_alone(mixer, left_pad_source):
    model = of(mixer)
    lengths, target_lengths = (7, 1, 12, 4), (6, 8, 3, 1)
    source, sizes, previous = batch(lengths, target_lengths, left_pad_source=left_pad_source)
    together, _ = model(source, sizes, previous)
    for row, (n, m) in enumerate(zip(lengths, target_lengths, strict=True)):
        alone_source = source[row : row + 1, -n:] if left_pad_source else source[row : row + 1, :n]
        alone, _ = model(alone_source, sizes[row : row + 1], previous[row : row + 1, :m])
        torch.testing.assert_close(together[row : row + 1, :m], alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if "cross" not in mixer])
@torch.no_grad()
def test_left_padded_targets(mixer):
    """With --left-pad-target the pads come before the words, and a causal convolution must not read them."""
    model = build(task_=task(left_pad_target=True), encoder_conv_type=mixer, decoder_conv_type=mixer)
    source, sizes, _ = batch((7, 7))
    words = torch.randint(4, 30, (1, 5))
    padded = torch.cat([torch.full((1, 3), 1), words], dim=1)
    together, _ = model(source[:1], sizes[:1], padded)
    alone, _ = model(source[:1], sizes[:1], words)
    torch.testing.assert_close(together[:, 3:], alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("given, left", [("True", True), (True, True), ("False", False), (False, False)])
def test_fairseqs_older_tasks_pad_on_the_left_too(given, left):
    """Their options are in task.args, some as text, and their task.cfg is None."""
    older = task()
    older.cfg, older.args = None, SimpleNamespace(left_pad_target=given)
    model = build(task_=older)
    assert {layer.self_attn.zero_pads for layer in model.decoder.layers} == {left}
    if left:
        with pytest.raises(ValueError, match="--decoder-cross-attention-conv cannot be used with --left-pad-target"):
            build(task_=older, decoder_cross_attention_conv="q")


@pytest.mark.parametrize("mixer", OURS)
def test_every_parameter_gets_a_gradient(mixer):
    """Plain DDP needs it: a parameter without gradient makes it wait for ever, or fail."""
    model = of(mixer, encoder_kernel_size_list=[2, 5, 8], decoder_kernel_size_list=[3, 4, 9]).train()
    model(*batch())[0].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("mixer", MIXERS)
def test_activation_checkpointing_changes_nothing(mixer):
    """Also not the dropout: the recomputation must draw the same masks, those of the filters among them."""

    def gradients(checkpoint_activations):
        torch.manual_seed(1)
        model = of(mixer, checkpoint_activations=checkpoint_activations, weight_dropout=0.3).train()
        torch.manual_seed(2)
        model(*batch())[0].square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        # Sums of several users of one tensor come in another order, hence not the same bits.
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("made", [build, build_lm])
def test_a_model_can_be_pickled(made):
    """torch.save(model), as with fairseq's own: the model must not hold the configuration it was built from."""
    model = made(decoder_conv_type="low-rank")
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    source, lengths, previous = batch()
    inputs = (previous,) if made is build_lm else (source, lengths, previous)
    assert torch.equal(again(*inputs)[0], model(*inputs)[0])


@pytest.mark.parametrize("what", ["model", "generator", "language model"])
def test_torchscript_is_refused_with_what_there_is_instead(what):
    model = build_lm() if what == "language model" else build("lightconv")
    if what == "generator":
        model = SequenceGenerator([model], dictionary(), beam_size=2)
    with pytest.raises(NotImplementedError, match=r"TorchScript is not supported .* LIGHTCONV_KEEP_UPSTREAM=1"):
        torch.jit.script(model)


def test_adaptive_softmax_in_translation():
    model = build(adaptive_softmax_cutoff=[10, 20], share_decoder_input_output_embed=True)
    source, lengths, previous = batch()
    output = model(source, lengths, previous)
    log_probs = model.get_normalized_probs(output, log_probs=True)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(previous.shape))
    model.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("mixer", OURS)
@torch.no_grad()
def test_half_precision_follows_float32(mixer):
    model = of(mixer)
    arguments = batch()
    full = model(*arguments)[0]
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)(*arguments)[0]
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), full, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("mixer", OURS)
def test_autocast(mixer):
    model = of(mixer).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch())[0].float().square().mean()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_beam_search_finds_the_scores_of_teacher_forcing(mixer):
    """fairseq's generator over the model: each hypothesis' token scores equal the full pass on that hypothesis."""
    d = dictionary()
    model = build(task_=task(d), encoder_conv_type=mixer, decoder_conv_type=mixer)
    source, lengths, _ = batch()
    generator = SequenceGenerator([model], d, beam_size=4, max_len_b=14)
    hypotheses = generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
    for row, beams in enumerate(hypotheses):
        for hypothesis in beams:
            tokens = hypothesis["tokens"]
            previous = torch.cat([torch.tensor([d.eos()]), tokens[:-1]])[None]
            with torch.no_grad():
                output = model(source[row : row + 1], lengths[row : row + 1], previous)
            log_probs = model.get_normalized_probs(output, log_probs=True)[0]
            scores = log_probs[torch.arange(len(tokens)), tokens]
            torch.testing.assert_close(hypothesis["positional_scores"], scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"encoder_layerdrop": 0.5}, {"decoder_layerdrop": 0.5}, {"quant_noise_pq": 0.1}], ids=str
)
def test_fairseqs_regularisers_vary_what_is_trained_and_nothing_else_does(options):
    dropouts = ("dropout", "attention_dropout", "weight_dropout", "input_dropout")
    model, arguments = build(**options, **dict.fromkeys(dropouts, 0.0)), batch()
    evaluated = model(*arguments)[0]
    passes = [model.train()(*arguments)[0] for _ in range(8)]
    assert all(torch.equal(one, evaluated) for one in passes) == (not options)
    layer, x = model.encoder.layers[0], torch.randn(5, 2, 16)
    assert torch.equal(layer(x, None), layer(x, None)) == ("quant_noise_pq" not in options)  # in a layer of ours
    sum(one.square().sum() for one in passes).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


SCALAR = {
    "lightweight": {},
    "talk": {"share_all_embeddings": True},
    "conv": {"adaptive_softmax_cutoff": [8, 20]},
    "attention": {"decoder_output_dim": 8},
    "window_attention": {"decoder_attention_conv": "q", "attention_conv_type": "lightweight"},
}


@pytest.mark.parametrize("mixer", SCALAR)
def test_scalar_quantisation_noise(mixer, monkeypatch):
    """Every Linear gets noise, as fairseq-train adds it with --quant-noise-scalar."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)  # fairseq's observers expect a GPU
    model = of(mixer, quant_noise_scalar=0.2, **SCALAR[mixer])
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    quantize_model_scalar(model, SimpleNamespace(quant_noise_scalar=0.2))
    left = [name for name in linears if isinstance(model.get_submodule(name), Linear)]
    # The shared output layer has no parameter of its own name.
    assert left == (["decoder.output_projection"] if "share_all_embeddings" in SCALAR[mixer] else [])
    model.train()(*batch())[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.decoder.layers.parameters())
    assert model.eval()(*batch())[0].isfinite().all()


def test_every_dropout_module_is_the_plugin_s_own():
    model = of("lightweight,attention,dynamic", dropout=0.1, attention_dropout=0.1, weight_dropout=0.1)
    modules = [module for module in model.modules() if isinstance(module, FairseqDropout)]
    assert modules and {type(module) for module in modules} == {Dropout}


@pytest.mark.parametrize(
    "names, kept",
    [
        (["LightConvEncoder"], {"encoder"}),
        (["LightConvDecoder"], {"decoder"}),
        (["LightConvEncoderLayer"], {"encoder.layers.0", "encoder.layers.0.self_attn"}),
        (["LightConvDecoderLayer"], {"decoder.layers.0", "decoder.layers.0.self_attn"}),
        (["LightweightConv1dTBC"], {"encoder.layers.0.self_attn.conv"}),
        (["DynamicConv1dTBC"], {"decoder.layers.0.self_attn.conv"}),
        (["DynamicConv_scripatable"], {"decoder.layers.0.self_attn.conv"}),
        (
            ["LightconvLayer", "DynamicconvLayer"],
            {f"{side}.layers.0.self_attn.conv" for side in ("encoder", "decoder")},
        ),
        (["MixerEncoderLayer"], {"encoder.layers.0"}),
        (["TransformerModel", "TransformerEncoder", "TransformerDecoder"], {"encoder", "decoder"}),
        (["TransformerEncoderLayer", "TransformerDecoderLayerBase"], {"encoder.layers.0", "decoder.layers.0"}),
        (["ConvBlock"], {"encoder.layers.0.self_attn", "decoder.layers.0.self_attn"}),
        ("LightConvEncoder, DynamicConv1dTBC", {"encoder", "decoder.layers.0.self_attn.conv"}),  # a command's text
    ],
)
def test_dropout_is_retained_by_upstreams_names(names, kept):
    """--retain-dropout-modules with the classes of fairseq's LightConv, of its Transformer, or with ours."""
    one = {"encoder_layers": 1, "encoder_kernel_size_list": [3], "decoder_layers": 1, "decoder_kernel_size_list": [3]}
    model = build(encoder_conv_type="lightweight", **one)
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=names)
    on = {name.rpartition(".")[0] for name, m in model.named_modules() if getattr(m, "apply_during_inference", False)}
    assert on == kept


def test_a_language_models_dropout_is_retained_by_upstreams_names():
    model = build_lm()
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=["LightConvDecoderLayer"])
    on = [name for name, m in model.named_modules() if getattr(m, "apply_during_inference", False)]
    assert len(on) == 9  # of the FFN's input and output, and of the block's input, in 3 layers
