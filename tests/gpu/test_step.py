"""What a training step does on a GPU alone: the loss, Adam in one launch, cross-attention, reading at once."""

import copy

import pytest
import torch

from lightconv_plugin import ops

PAD = 1


def assert_close(found: dict, wanted: dict, limit: float):
    """Tensors by name, to `limit` of the largest element. A softmax cancels the keys' bias: its gradient is noise."""
    for name, tensor in wanted.items():
        scale = wanted[name.replace("k_proj.bias", "k_proj.weight")].abs().max().item()
        said = f"{name}: {{}}".format
        torch.testing.assert_close(found[name], tensor, rtol=limit, atol=limit * scale + 1e-6, msg=said)


def on(device: torch.device, batch: dict) -> dict:
    inputs = {name: tensor.to(device) for name, tensor in batch["net_input"].items()}
    return {**batch, "net_input": inputs, "target": batch["target"].to(device)}


def assert_as_close(found: dict, like: dict, truth: dict, dtype: torch.dtype):
    """`found` is off the truth by little more than `like`, which was computed with the same precision.

    A fixed limit alone does not do for the gradients of a whole model: norms of small vectors multiply the rounding, by
    how much depends on the weights. In bfloat16, where some units of a small model even fall on the other side of a
    ReLU, all gradients are one vector.
    """
    results = [{n: x.double() for n, x in r.items() if not n.endswith("k_proj.bias")} for r in (found, like, truth)]
    floor = 1e-3
    if dtype != torch.float32:
        losses = [result.pop("loss") for result in results]
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=0)
        results, floor = [{"all": torch.cat([x.flatten() for x in result.values()])} for result in results], 0.1
    found, like, truth = results
    for name, exact in truth.items():
        off, allowed = (float((result[name] - exact).norm()) for result in (found, like))
        assert off <= 3 * allowed + floor * float(exact.norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("words", [41, 8368, 32768])
def test_the_loss_is_the_cpus(words, dtype, cuda):
    generator = torch.Generator().manual_seed(words)
    logits = torch.randn(300, words, generator=generator).to(dtype)
    target = torch.randint(words, (300,), generator=generator)
    target[::7] = PAD
    results = []
    for device in ("cpu", cuda):
        leaf = logits.to(device, copy=True).requires_grad_()
        loss, nll = ops.label_smoothed_nll_loss(leaf, target.to(device), 0.1, PAD)
        loss.sum().backward()
        results.append([x.detach().cpu().float() for x in (loss, nll, leaf.grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "betas": (0.9, 0.98)}], ids=["plain", "decay"])
def test_adam_is_fairseqs_on_the_cpu(options, cuda):
    Adam = pytest.importorskip("fairseq.optim.adam", reason="fairseq is not installed").Adam
    import lightconv_plugin.models  # noqa: F401 (the patches)

    results = []
    for device in ("cpu", cuda):
        generator = torch.Generator().manual_seed(0)
        draw = [torch.randn(shape, generator=generator) for shape in ((30, 7), (5,), ())]
        parameters = [torch.nn.Parameter(tensor.to(device)) for tensor in draw]
        optimizer = Adam(parameters, lr=0.01, **options)
        for _ in range(100):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_over_the_encoder(dtype, cuda):
    fairseq = pytest.importorskip("fairseq.modules", reason="fairseq is not installed")
    from lightconv_plugin.models.token_mixers import FusedEncoderAttention

    options = {"kdim": 48, "vdim": 48, "encoder_decoder_attention": True}
    attention = FusedEncoderAttention(64, 4, **options).to(cuda, dtype).train()
    query, encoded = torch.randn(9, 5, 64, device=cuda, dtype=dtype), torch.randn(11, 5, 48, device=cuda, dtype=dtype)
    pads = torch.arange(11, device=cuda) >= torch.tensor([11, 7, 3, 1, 9], device=cuda)[:, None]
    results = []
    for forward in (FusedEncoderAttention.forward, fairseq.MultiheadAttention.forward):
        attention.zero_grad()
        out, _ = forward(attention, query, encoded, encoded, key_padding_mask=pads, need_weights=False, static_kv=True)
        out.float().square().sum().backward()
        results.append({"out": out.detach()} | {name: p.grad for name, p in attention.named_parameters()})
    assert_close(*results, 1e-4 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [23, 64, 128, 192])
def test_attention_at_the_sizes_of_a_training(keys, dtype, cuda):
    """Output and gradients against float64, with left pads: of cuDNN's kernels, some sizes had wrong gradients."""
    from lightconv_plugin.modules.attention import dot_product_attention

    generator = torch.Generator().manual_seed(keys)
    sizes = ((32, 8, 27, 64), (32, 8, keys, 64), (32, 8, keys, 64))
    given = [torch.randn(size, generator=generator) for size in sizes]
    mask = (torch.arange(keys) < torch.arange(32)[:, None] * keys // 40)[:, None, None]
    results = []
    for there, kind in ((torch.device("cpu"), torch.float64), (cuda, dtype)):
        leaves = [x.to(dtype).to(there, kind, copy=True).requires_grad_() for x in given]
        added = torch.zeros(mask.shape, dtype=kind, device=there).masked_fill_(mask.to(there), -torch.inf)
        out = dot_product_attention(*leaves, added)
        out.square().sum().backward()
        results.append([x.detach().cpu().double() for x in (out, *(leaf.grad for leaf in leaves))])
    for name, wanted, found in zip(("out", "queries", "keys", "values"), *results, strict=True):
        assert (found - wanted).norm() < 2e-2 * wanted.norm(), name


def test_norm_and_losses_are_read_at_once(cuda):
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from lightconv_plugin.compat.reading import read_at_once

    logged = [{"loss": torch.tensor(0.25, device=cuda), "ntokens": 7}, {"loss": torch.tensor([3], device=cuda)}]
    norm = read_at_once(torch.tensor(1.5, device=cuda), logged)
    assert norm.device.type == "cpu" and norm == 1.5
    assert [log["loss"].device.type for log in logged] == ["cpu", "cpu"]
    assert logged[0]["loss"] == 0.25 and torch.equal(logged[1]["loss"], torch.tensor([3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(300, 1024), (7, 3, 257), (5, 4096)], ids=str)
def test_norm_and_relu_with_dropout_are_the_cpus(shape, dtype, cuda):
    """To the mask: the host draws the same seeds for both."""
    generator = torch.Generator().manual_seed(sum(shape))
    given = [torch.randn(size, generator=generator).to(dtype) for size in (shape, shape, shape[-1:], shape[-1:])]
    results = []
    for device in ("cpu", cuda):
        torch.manual_seed(5)
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
        out = ops.dropout_add_layer_norm(*leaves, 0.3)
        relu = ops.relu_dropout(leaves[0], 0.3)
        (out.float().square().mean() + relu.float().square().mean()).backward()
        results.append([x.detach().cpu().float() for x in (out, relu, *(leaf.grad for leaf in leaves))])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit * other.abs().max().item())


def test_a_graph_draws_new_masks_when_it_is_replayed(cuda):
    x = torch.ones(64, 64, device=cuda)
    ops.relu_dropout(x, 0.5)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.relu_dropout(x, 0.5)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.cpu())
    assert not torch.equal(*seen) and 0.4 < seen[0].count_nonzero() / seen[0].numel() < 0.6


@pytest.mark.parametrize("arch", ["dynamicconv", "transformer"])
def test_joined_layers_train_as_separate_ones(arch, cuda):
    """Without dropout, in float32: outputs and gradients of a step."""
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from lightconv_plugin.models.joined import join_passes
    from tests.models import test_step_graphs as cases
    from tests.models import toys

    torch.manual_seed(0)
    mixer = {"encoder_conv_type": "attention", "decoder_conv_type": "attention"} if arch == "transformer" else {}
    model = toys.build("dynamicconv", **cases.STILL, **mixer).to(cuda).train()
    batch, results = [tensor.to(cuda) for tensor in toys.batch()], []
    for _ in range(2):
        model.zero_grad()
        out, _ = model(*batch)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        join_passes(model)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("arch", ["dynamicconv", "transformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_with_dropout_has_the_cpus_gradients(arch, dtype, cuda):
    """A whole step: the host draws the same masks for both, but not those of embeddings and of a mixer's input."""
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from lightconv_plugin.models.joined import join_passes
    from tests.models import test_step_graphs as cases
    from tests.models import toys

    dropped = cases.STILL | {"dropout": 0.3, "relu_dropout": 0.2, "weight_dropout": 0.2}
    mixer = {"encoder_conv_type": "attention", "decoder_conv_type": "attention"} if arch == "transformer" else {}
    torch.manual_seed(0)
    model, loss = toys.build("dynamicconv", **dropped, **mixer).to(dtype).train(), cases.criterion()
    join_passes(model, loss)
    for side in (model.encoder, model.decoder):
        side.dropout_module.p = 0.0
    results = []
    for device, kind in ((cuda, dtype), (torch.device("cpu"), dtype), (torch.device("cpu"), torch.float64)):
        on_it = copy.deepcopy(model).to(device, kind)
        torch.manual_seed(3)
        value = cases.plain_step(on_it, loss, on(device, cases.BATCHES[0]))[0]
        results.append({name: x.cpu() for name, x in ({"loss": value.detach()} | cases.gradients(on_it)).items()})
    assert_as_close(*results, dtype)


@pytest.mark.parametrize("arch", ["dynamicconv", "transformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_graphs_have_the_same_gradients(arch, dtype, cuda):
    """Without dropout, over batches of several sizes, the longest in the middle."""
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from lightconv_plugin.models.joined import join_passes
    from lightconv_plugin.models.step_graphs import StepGraphs
    from lightconv_plugin.modules.recorder import CudaGraphs
    from tests.models import test_step_graphs as cases
    from tests.models import toys

    mixer = {"encoder_conv_type": "attention", "decoder_conv_type": "attention"} if arch == "transformer" else {}
    model = toys.build("dynamicconv", **cases.STILL, **mixer).to(cuda, dtype).train()
    join_passes(model)
    loss = cases.criterion()
    graphs = StepGraphs(model, loss, recorder=CudaGraphs(cuda), pad=cases.PAD, left_pad_source=True)
    exact = copy.deepcopy(model).cpu().double()
    for batch in [*cases.BATCHES, cases.sample(20, 30, 30)] * 3:
        results = []
        for step in (graphs.step, lambda batch, _: cases.plain_step(model, loss, batch)):
            model.zero_grad(set_to_none=True)
            value = step(on(cuda, batch), cases.PLAIN)[0]
            results.append({name: x.cpu() for name, x in ({"loss": value} | cases.gradients(model)).items()})
        exact.zero_grad(set_to_none=True)
        value = cases.plain_step(exact, loss, batch)[0]
        assert_as_close(*results, {"loss": value} | cases.gradients(exact), dtype)


def test_a_graph_of_a_step_drops_anew(cuda):
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from lightconv_plugin.models.step_graphs import StepGraphs
    from lightconv_plugin.modules.recorder import CudaGraphs
    from tests.models import test_step_graphs as cases
    from tests.models import toys

    model = toys.build("dynamicconv", dropout=0.3).to(cuda).train()
    graphs = StepGraphs(model, cases.criterion(), recorder=CudaGraphs(cuda), pad=cases.PAD, left_pad_source=True)
    batch = on(cuda, cases.BATCHES[0])
    assert len({float(graphs.step(batch, cases.PLAIN)[0]) for _ in range(6)}) == 6
