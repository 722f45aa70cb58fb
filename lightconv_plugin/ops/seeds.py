"""Seeds of dropout: numbers of torch's default generators, drawn for each call."""

from __future__ import annotations

import torch
from torch import Tensor

from lightconv_plugin.ops import backends

_HIGHEST = 2**63 - 1


def draw(p: float, like: Tensor, on_device: bool = False) -> Tensor | None:
    """A seed (1,) int64 for a dropout of `like` with probability p; None for p = 0.

    The native kernels for GPUs take a seed of the host's, which is passed with the launch: drawing one on the device
    would be a launch of its own. They also take one on the device, which a graph needs: it must draw anew when it is
    replayed. on_device: the operator has no kernel for GPUs, and so wants its seed there too.
    """
    if p == 0:
        return None
    device = torch.device("cpu") if not on_device and _by_host(like) else like.device
    return torch.randint(_HIGHEST, (1,), dtype=torch.int64, device=device)


def _by_host(like: Tensor) -> bool:
    traced = torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter)
    if traced or torch._C._are_functorch_transforms_active() or not backends.on_gpu(like):
        return False
    if like.device.type == "meta":
        return True
    return backends.backend("cuda") == "cuda" and not torch.cuda.is_current_stream_capturing()
