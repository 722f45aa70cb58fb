"""The operators inside torch.func's transforms (grad, vjp, jacrev, vmap).

torch.func does not see the derivatives that are registered with the dispatcher, in Python or in C++. It differentiates
autograd functions, so inside a transform a call goes through one, with the setup and backward pass of registration.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightconv_plugin.ops import checks

_functions: dict[str, type[torch.autograd.Function]] = {}


def call(name: str, *args: Any) -> Any:
    """The operator `name` of the namespace `lightconv`, differentiable by autograd and by torch.func."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _functions[name].apply(*args)
    return getattr(torch.ops.lightconv, name).default(*args)


def register(name: str, setup: Callable[..., Any] | None, backward: Callable[..., Any]) -> None:
    """Make the autograd function of an operator; `setup` and `backward` as for torch.library.register_autograd."""
    operator = getattr(torch.ops.lightconv, name).default
    methods = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda *args: operator(*args)),
        "setup_context": staticmethod(setup or _nothing),
        "backward": staticmethod(backward),
        "jvp": staticmethod(checks.no_forward_mode),
    }
    _functions[name] = type(name, (torch.autograd.Function,), methods)


def _nothing(ctx, inputs, output) -> None:
    pass
