"""Refusing what makes the host wait for a device: such code is slow on a GPU and cannot be captured in a CUDA graph.

Without a GPU there are two ways to see it. On the CPU nothing waits, but the operations are the same: reading a number,
and results whose size depends on numbers. And tensors of the device "meta" have no numbers that could be read; there a
number on the host can be told from one on the device, and code takes the branches that are not for CPUs. A third way
gives "meta" numbers, for code that waits now and then: `PretendDevice`.
"""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


class OnDevice(torch.Tensor):
    """A tensor of the device "meta" that has numbers after all: those of `numbers`, on the CPU. See `PretendDevice`."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers):
        # strides and offset as those of the numbers, so that views are views
        sizes, strides = numbers.shape, numbers.stride()
        made = torch.Tensor._make_wrapper_subclass(
            cls, sizes, strides, numbers.storage_offset(), dtype=numbers.dtype, device="meta"
        )
        made.numbers = numbers
        return made

    def tolist(self):
        return self.cpu().tolist()  # as torch does for a device, and refuses to do for a class of one's own

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func}: outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Inside, "meta" is a device that computes (on the CPU), and each wait of the host for it is noted.

    `put` moves a tensor to it. waits: the operators that waited, in their order. Copies to the device that are marked
    as not blocking do not wait.
    """

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return OnDevice(tensor.detach().clone())

    def put_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """A copy of the model there."""
        model = copy.deepcopy(model)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(self.put(parameter), requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, self.put(buffer))
        return model

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        theirs = any(isinstance(tensor, OnDevice) for tensor in given)
        asked = kwargs.get("device")
        to = torch.device(asked).type if asked is not None else None
        if _waits(func, args, kwargs, given, to):
            self.waits.append(str(func.overloadpacket))
        if to == "meta":
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
        stays = to == "meta" or (theirs and to is None)
        if func.overloadpacket is aten._to_copy and stays is False:
            out = out.clone()
        return tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) and stays else x, out)


def _numbers(leaf):
    return leaf.numbers if isinstance(leaf, OnDevice) else leaf


def _waits(func, args, kwargs, given, to) -> bool:
    """Whether the host waits for an operator with tensors `given`, whose result is asked for on the device `to`."""
    on_device = {isinstance(tensor, OnDevice) for tensor in given if tensor.dim() or isinstance(tensor, OnDevice)}
    if func.overloadpacket is aten._to_copy and to is not None and {to == "meta"} != on_device:
        return not (to == "meta" and kwargs.get("non_blocking"))
    if len(on_device) == 2:
        if func.overloadpacket is aten.copy_:
            return not (isinstance(args[0], OnDevice) and args[2:3] == (True,))
        raise AssertionError(f"{func}: tensors on the host and on the device")
    return on_device == {True} and _reads(func, args, kwargs)
