"""RMSNorm: public function, registered ops, autograd."""

import math

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_float, check_same_device
from ..common.dispatch import Backends
from ..common.eager import is_batched, is_eager, refuse_forward_ad

BACKENDS = Backends(__package__, "triton", "reference")
ROUNDINGS = ("once", "normalized", "scale")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, rounding: str = "once"
) -> torch.Tensor:
    """Root mean square norm over the last dimension: x * rsqrt(mean(x^2) + eps) * weight.

    Computed in float32 (float64 for float64 x). Differentiable in x and weight; the backward reads x again and saves
    nothing else, and reduces the weight's gradient in a fixed order.

    Args:
        x: [..., D], float16, bfloat16, float32 or float64, any strides.
        weight: [D] of a float dtype (V4 keeps norm weights in fp32), or None.
        eps: added to the mean square.
        rounding: what is rounded to x's dtype, for parity with the host model:
            "once": the result alone, of x's dtype (transformers >= 5.20);
            "normalized": x * rsqrt(...), then multiplied by the weight in the wider of both dtypes, which is also the
            result's: fp32 for bf16 x and fp32 weight (transformers 5.17 to 5.19);
            "scale": rsqrt(...), then the product (transformers' DeepseekV4UnweightedRMSNorm); takes no weight.

    Returns:
        A fresh tensor of x's shape, in x's memory order where x is dense.

    Raises:
        TypeError: x or weight is no dense float tensor, or eps is no float.
        ValueError: x without dimensions, a weight whose shape is not [D] or on another device, an unknown rounding,
            "scale" with a weight, or an eps that is negative or not finite.
        NotImplementedError: no backend covers the call; says why for each.

    Source: Zhang & Sennrich 2019; transformers `modeling_deepseek_v4.DeepseekV4RMSNorm`.
    """
    if type(eps) is not float or type(rounding) is not str:
        eps = _check_flags(eps, rounding)
    if not (is_eager(x) if weight is None else is_eager(x, weight)):
        _check(x, weight, eps, rounding)
        refuse_forward_ad(x=x, weight=weight)
        return ops.rms_norm(x, weight, eps, rounding)
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _RmsNorm.apply(x, weight, eps, rounding)
    return _rms_norm(x, weight, eps, rounding)


def _check_flags(eps, rounding):
    if type(rounding) is not str:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if type(eps) not in (int, float):
        raise TypeError(f"eps must be a float, got {eps!r}")
    return float(eps)


def _check(x, weight, eps, rounding):
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if weight is not None:
        check_float("weight", weight)
        check_same_device("weight", weight, "x", x)
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight must have shape ({x.shape[-1]},), x's last dimension, got {tuple(weight.shape)}")
        if rounding == "scale":
            raise ValueError("rounding='scale' is the unweighted norm's and takes no weight")


def _rms_norm(x, weight, eps, rounding):
    key = (*_key(x, weight), eps, rounding)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        _check(x, weight, eps, rounding)
        out = _empty(x, weight, rounding)
        launch = BACKENDS.remember(key, BACKENDS.choose(x, out).prepare_forward(x, weight, out, eps, rounding))
    out = _empty(x, weight, rounding)
    launch(x, weight, out)
    return out


def _rms_norm_backward(dout, x, weight, eps, weight_grad):
    key = (*_key(x, weight), dout.stride(), dout.dtype, eps, weight_grad)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        dx, dweight = _empty_backward(x, weight, weight_grad)
        backend = BACKENDS.choose(x, dout, dx)
        launch = BACKENDS.remember(key, backend.prepare_backward(x, weight, dout, dx, dweight, eps))
    dx, dweight = _empty_backward(x, weight, weight_grad)
    launch(x, weight, dout, dx, dweight)
    return dx, dweight


def _key(x, weight):
    """All that the checks and the launch depend on but the data and its alignment."""
    try:
        if weight is None:
            return x.shape, x.stride(), x.dtype, x.get_device()
        return (
            *(x.shape, x.stride(), x.dtype, x.get_device()),
            *(weight.shape, weight.stride(), weight.dtype, weight.get_device()),
        )
    except RuntimeError:  # no strides: a sparse or nested tensor, of which the check says more
        _check(x, weight, 0.0, "once")
        raise


def _empty(x, weight, rounding):
    if weight is not None and rounding == "normalized":
        return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    return torch.empty_like(x)


def _empty_backward(x, weight, weight_grad):
    """dx, and dweight, which has no elements where nobody wants it: an op can't return None."""
    return torch.empty_like(x), weight.new_empty(weight.shape) if weight_grad else x.new_empty(0)


def _save(ctx, x, weight, eps):
    ctx.eps = eps
    ctx.save_for_backward(x, weight)


def _backward(ctx, dout):
    x, weight = ctx.saved_tensors
    # With create_graph the dispatcher must see the op: its derivative is refused there.
    eager = is_eager(dout) and not is_batched(dout) and not torch.is_grad_enabled()
    weight_grad = weight is not None and ctx.needs_input_grad[1]
    dx, dweight = (_rms_norm_backward if eager else ops.rms_norm_backward)(dout, x, weight, ctx.eps, weight_grad)
    return dx, dweight if weight_grad else None, None, None


class _RmsNorm(torch.autograd.Function):
    """The registered op's autograd formula without the dispatcher."""

    @staticmethod
    def forward(ctx, x, weight, eps, rounding):
        _save(ctx, x, weight, eps)
        return _rms_norm(x, weight, eps, rounding)

    backward = staticmethod(_backward)


DEVICES = ("cpu", "cuda", "xpu")

torch.library.define(
    add_op_namespace_prefix("rms_norm"), "(Tensor x, Tensor? weight, float eps, str rounding) -> Tensor"
)
torch.library.impl(add_op_namespace_prefix("rms_norm"), DEVICES, _rms_norm)
torch.library.register_fake(
    add_op_namespace_prefix("rms_norm"), lambda x, weight, eps, rounding: _empty(x, weight, rounding)
)
torch.library.register_autograd(
    add_op_namespace_prefix("rms_norm"), _backward, setup_context=lambda ctx, inputs, output: _save(ctx, *inputs[:3])
)

torch.library.define(
    add_op_namespace_prefix("rms_norm_backward"),
    "(Tensor dout, Tensor x, Tensor? weight, float eps, bool weight_grad) -> (Tensor, Tensor)",
)
torch.library.impl(add_op_namespace_prefix("rms_norm_backward"), DEVICES, _rms_norm_backward)
torch.library.register_fake(
    add_op_namespace_prefix("rms_norm_backward"), lambda dout, x, weight, eps, weight_grad: _empty_backward(x, weight, weight_grad)
)


def _backward_twice(ctx, *_):
    raise NotImplementedError("rms_norm can be differentiated once; its backward has no derivative")


torch.library.register_autograd(add_op_namespace_prefix("rms_norm_backward"), _backward_twice)
