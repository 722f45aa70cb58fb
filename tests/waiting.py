"""Refusing what makes the host wait for a device: such code is slow on a GPU and cannot be captured in a CUDA graph.

Without a GPU there are two ways to see it. On the CPU nothing waits, but the operations are the same: reading a number,
and results whose size depends on numbers. And tensors of the device "meta" have no numbers that could be read; there a
number on the host can be told from one on the device, and code takes the branches that are not for CPUs.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_COPIES = (aten._to_copy, aten.copy_)
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RefuseToWait(TorchDispatchMode):
    """Fails at the first operation for which the host would wait for `device`. seen: how many there were until then."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device, self.seen = device, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        kwargs = kwargs or {}
        devices = {tensor.device.type for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        if self.device in devices and _reads(func, args, kwargs):
            raise AssertionError(f"{func}: the host would wait for the device")
        if func.overloadpacket in _COPIES:
            devices |= {torch.device(device).type for device in (kwargs.get("device"),) if device is not None}
            if self.device in devices and len(devices) > 1:
                raise AssertionError(f"{func}: a copy from one device to another, {' and '.join(sorted(devices))}")
        return func(*args, **kwargs)


def _reads(func, args, kwargs) -> bool:
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return not _READING.isdisjoint(func.tags)
