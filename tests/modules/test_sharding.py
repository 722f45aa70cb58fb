"""Models whose layers are sharded one by one (torch.distributed.fsdp.fully_shard)."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from tests.modules.plain_models import model_of, words

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch cannot shard modules on a CPU"
)


@pytest.fixture
def alone():
    """A group of one process; a layer's parameters are whole only within its forward pass, as in a larger group."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("encoder", [True, False], ids=["translation", "language-model"])
def test_loss_and_gradients_are_those_of_the_whole_model(encoder, checkpointing, alone):
    whole = model_of("dynamic", encoder=encoder)
    sharded = copy.deepcopy(whole)
    for stack in (sharded.encoder, sharded.decoder) if encoder else (sharded.decoder,):
        stack.gradient_checkpointing = checkpointing
        for layer in stack.layers:
            fully_shard(layer, mesh=alone)
    fully_shard(sharded, mesh=alone)
    texts = [words("cpu", 7)] * encoder + [words("cpu")] * 2
    losses = []
    for model in (whole, sharded):
        torch.manual_seed(3)
        losses.append(model(*texts).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-6)
