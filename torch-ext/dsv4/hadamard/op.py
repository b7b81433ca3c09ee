"""Walsh-Hadamard transform: public function, registered op, autograd."""

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_float
from ..common.dispatch import Backends
from ..common.eager import is_eager
from .configs import MAX_WIDTH

BACKENDS = Backends(__package__, "triton", "reference")


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Walsh-Hadamard transform of each row, times a scale: scale * (x @ H), with H in natural order.

    H is symmetric with entries 1 and -1, in the order of `scipy.linalg.hadamard`; `scale=D**-0.5` makes the transform
    orthonormal. Sums are float32 (float64 for float64 x) and rounded once, after the scale. Differentiable in x any
    number of times: the gradient is the same transform of the output's gradient, and nothing is saved.

    Args:
        x: [..., D], D a power of two from 1 to 4096; float16, bfloat16, float32 or float64; any strides.
        scale: a number.

    Returns:
        A fresh tensor of x's shape and dtype, in x's memory order where x is dense.

    Raises:
        TypeError: x is no float tensor, or scale no number.
        ValueError: x without dimensions, or a last dimension that is no power of two or longer than 4096.
        NotImplementedError: no backend covers the call; says why for each.

    Source: DeepSeek-V4 inference code `rotate_activation` (`fast_hadamard_transform.hadamard_transform`).
    """
    if not is_eager(x):
        _check(x, scale)
        return ops.hadamard_transform(x, scale)
    if x.requires_grad and torch.is_grad_enabled():
        return _HadamardTransform.apply(x, scale)
    return _hadamard_transform(x, scale)


def _check(x, scale):
    check_float("x", x)
    if not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    width = x.shape[-1]
    if not 1 <= width <= MAX_WIDTH or width & (width - 1):
        raise ValueError(f"x's last dimension must be a power of two from 1 to {MAX_WIDTH}, got {width}")


def _hadamard_transform(x, scale):
    # get_device() and not .device: an int, cheaper to make, hash and compare.
    key = (x.shape, x.stride(), x.dtype, x.get_device(), scale)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        _check(x, scale)
        out = torch.empty_like(x)
        launch = BACKENDS.remember(key, BACKENDS.choose(x, out).prepare_transform(x, out, scale))
    out = torch.empty_like(x)
    launch(x, out)
    return out


def _backward(ctx, dout):
    # H is its own transpose. The public function: with create_graph the gradient is differentiable again.
    return hadamard_transform(dout, ctx.scale), None


class _HadamardTransform(torch.autograd.Function):
    """The registered op's autograd formula without the dispatcher."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return _hadamard_transform(x, scale)

    backward = staticmethod(_backward)


def _save(ctx, inputs, output):
    ctx.scale = inputs[1]


torch.library.define(add_op_namespace_prefix("hadamard_transform"), "(Tensor x, float scale) -> Tensor")
torch.library.impl(add_op_namespace_prefix("hadamard_transform"), ("cpu", "cuda", "xpu"), _hadamard_transform)
torch.library.register_fake(add_op_namespace_prefix("hadamard_transform"), lambda x, scale: torch.empty_like(x))
torch.library.register_autograd(add_op_namespace_prefix("hadamard_transform"), _backward, setup_context=_save)
