"""RMSNorm: public function, registered ops, autograd."""

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_float, check_same_device
from ..common.dispatch import Backends

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
        TypeError: x or weight is no float tensor.
        ValueError: x without dimensions, a weight whose shape is not [D] or on another device, an unknown rounding, or
            "scale" with a weight.
        NotImplementedError: no backend covers the call; says why for each.

    Source: Zhang & Sennrich 2019; transformers `modeling_deepseek_v4.DeepseekV4RMSNorm`.
    """
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if weight is not None:
        check_float("weight", weight)
        check_same_device("weight", weight, "x", x)
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight must have shape ({x.shape[-1]},), x's last dimension, got {tuple(weight.shape)}")
        if rounding == "scale":
            raise ValueError("rounding='scale' is the unweighted norm's and takes no weight")
    return ops.rms_norm(x, weight, eps, rounding)


def _empty(x, weight, rounding):
    if weight is not None and rounding == "normalized":
        return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    return torch.empty_like(x)


def _rms_norm(x, weight, eps, rounding):
    out = _empty(x, weight, rounding)
    BACKENDS.choose(x, out).rms_norm_into(out, x, weight, eps, rounding)
    return out


def _empty_backward(x, weight):
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _rms_norm_backward(dout, x, weight, eps):
    dx, dweight = _empty_backward(x, weight)
    BACKENDS.choose(x, dout, dx).rms_norm_backward_into(dx, dweight, dout, x, weight, eps)
    return dx, dweight


def _setup_context(ctx, inputs, output):
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dout):
    x, weight = ctx.saved_tensors
    dx, dweight = ops.rms_norm_backward(dout, x, weight, ctx.eps)
    return dx, None if weight is None else dweight, None, None


DEVICES = ("cpu", "cuda", "xpu")

torch.library.define(
    add_op_namespace_prefix("rms_norm"), "(Tensor x, Tensor? weight, float eps, str rounding) -> Tensor"
)
torch.library.impl(add_op_namespace_prefix("rms_norm"), DEVICES, _rms_norm)
torch.library.register_fake(
    add_op_namespace_prefix("rms_norm"), lambda x, weight, eps, rounding: _empty(x, weight, rounding)
)
torch.library.register_autograd(add_op_namespace_prefix("rms_norm"), _backward, setup_context=_setup_context)

torch.library.define(
    add_op_namespace_prefix("rms_norm_backward"), "(Tensor dout, Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)"
)
torch.library.impl(add_op_namespace_prefix("rms_norm_backward"), DEVICES, _rms_norm_backward)
torch.library.register_fake(
    add_op_namespace_prefix("rms_norm_backward"), lambda dout, x, weight, eps: _empty_backward(x, weight)
)


def _backward_twice(ctx, *_):
    raise NotImplementedError("rms_norm can be differentiated once; its backward has no derivative")


torch.library.register_autograd(add_op_namespace_prefix("rms_norm_backward"), _backward_twice)
