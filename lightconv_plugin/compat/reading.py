"""A patch that changes when fairseq's Trainer reads numbers from a GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops.backends import on_gpu


@patch(versions="all versions of fairseq")
def reads_after_the_norm() -> None:
    """On a GPU, fairseq reads the gradients' norm, the losses and more one after the other, some after the update.

    Each read waits until the device has done everything before it, so the next forward pass is not enqueued while the
    optimizer runs. Here the norm and the losses of all batches of an update are read at once, before the optimizer.
    With several processes fairseq has summed the losses on the device, and reads them as before.
    """
    from fairseq.trainer import Trainer

    train_step, clip_grad_norm = Trainer.train_step, Trainer.clip_grad_norm

    @functools.wraps(train_step)
    def noting_step(self: Any, samples: list, raise_oom: bool = False) -> Any:
        logged: list[dict] = []
        step = _noting(self.task.train_step, logged)
        with replaced(self.task, "train_step", step), replaced(self, "_unread", logged):
            return train_step(self, samples, raise_oom)

    @functools.wraps(clip_grad_norm)
    def read_norm(self: Any, clip_norm: float) -> Any:
        norm = clip_grad_norm(self, clip_norm)
        return read_at_once(norm, getattr(self, "_unread", [])) if _on_device(norm) else norm

    Trainer.train_step = noting_step
    Trainer.clip_grad_norm = read_norm


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the attribute of this object has this value; a step may be repeated inside a step (--amp)."""
    before = dict(vars(thing))
    setattr(thing, name, value)
    try:
        yield
    finally:
        if name in before:
            setattr(thing, name, before[name])
        else:
            delattr(thing, name)


def _noting(step: Callable[..., Any], logged: list[dict]) -> Callable[..., Any]:
    """`step`, with the logging output that it returns added to `logged`."""

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if isinstance(result[2], dict):
            logged.append(result[2])
        return result

    return noted


def read_at_once(norm: Tensor, logged: list[dict]) -> Tensor:
    """`norm` on the CPU; in the logging outputs, the single numbers on its device are replaced by such on the CPU."""
    places = [(log, key) for log in logged for key, value in log.items() if _on_device(value) and value.numel() == 1]
    numbers = torch.stack(
        [x.reshape(()).to(norm.device, torch.float64) for x in (norm, *(log[k] for log, k in places))]
    )
    numbers = numbers.cpu()
    for (log, key), number in zip(places, numbers[1:], strict=True):
        log[key] = number.to(log[key].dtype).view(log[key].shape)
    return numbers[0].to(norm.dtype).view(norm.shape)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and on_gpu(value)
