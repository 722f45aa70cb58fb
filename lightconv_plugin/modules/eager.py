"""Whether a tensor's operations run here and now, so that a module may take a faster way than torch's own."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_ORDINARY = (Tensor, nn.Parameter)


def eager(*tensors: Tensor) -> bool:
    """Not while a graph is being traced, nor in torch.func's transforms and forward-mode derivatives, nor for tensors
    of other classes, such as fake or distributed ones: all of these know torch's own operators only."""
    return bool(
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and get_proxy_mode() is None
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(type(tensor) in _ORDINARY for tensor in tensors)
    )
