"""The linear layers of these models: one initialisation, and on CPUs the faster of torch's two matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules import products
from lightconv_plugin.modules.eager import eager

# Below these sizes, oneDNN's preparation takes longer than the product.
_ROWS, _WEIGHTS = 64, 128 * 256


class Linear(nn.Linear):
    """nn.Linear initialised by Glorot & Bengio (2010); (…, in_features) → (…, out_features).

    So are the linear layers of upstream's models, except those that predict DynamicConv's filters (docs/migration.md).

    On CPUs where oneDNN multiplies float32 matrices faster than torch (products.py), this layer uses oneDNN.
    """

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight  # read once: a parametrised one is computed each time
        if _suits(input, weight):
            out = _Product.apply(input.reshape(-1, input.shape[-1]).contiguous(), weight, self.bias)
            return out.reshape(*input.shape[:-1], out.shape[-1])  # not out_features: fairseq widens tied weights
        return F.linear(input, weight, self.bias)


def replace_linear(module: nn.Module) -> None:
    """Turn every nn.Linear in `module` into a `Linear` with the same parameters, in place."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Linear  # hooks, names and parameters stay as they are


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether to compute x @ weightᵀ with oneDNN."""
    return (
        eager(x, weight)  # first: while a graph is being traced, the sizes are not to be read
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == weight.shape[-1]  # otherwise torch's product reports it
        and x.numel() >= _ROWS * x.shape[-1]
        and weight.numel() >= _WEIGHTS
        and torch._C._len_torch_dispatch_stack() == 0  # FLOP counters and other modes know torch's product only
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and products.onednn_is_faster()
    )


class _Product(torch.autograd.Function):
    """`products.product` with its derivatives, of any order."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # the gradient of a sum is one number, expanded
        wanted = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if wanted[0]:
            grad_x = _times(grad, weight.t())
        if wanted[1]:
            # The product is faster if the factor with more rows is on the left.
            if weight.shape[0] > weight.shape[1]:
                grad_weight = _times(x.t().contiguous(), grad.t()).t()
            else:
                grad_weight = _times(grad.t(), x.t())
        if wanted[2]:
            grad_bias = grad.sum(dim=0)
        return grad_x, grad_weight, grad_bias


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weightᵀ in a backward pass, which may run in a vmap or a dual level although the forward pass did not."""
    return _Product.apply(x, weight, None) if eager(x, weight) else F.linear(x, weight)
