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

    def setup_context(ctx, inputs, output) -> None:
        if setup is not None:
            setup(ctx, inputs, output)
        ctx.set_materialize_grads(True)  # torch 2.6 cannot batch a gradient that is None

    methods = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda *args: operator(*args)),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(checks.no_forward_mode),
    }
    _functions[name] = type(name, (torch.autograd.Function,), methods)
