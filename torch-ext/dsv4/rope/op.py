"""Partial interleaved rotary embedding: public functions, registered ops, autograd."""

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_float, check_same_device, overlaps_itself, span
from ..common.dispatch import Backends
from ..common.eager import is_batched, is_eager, refuse_forward_ad

BACKENDS = Backends(__package__, "triton", "reference")


def apply_rotary_pos_emb(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1, *, inverse: bool = False
) -> torch.Tensor:
    """Rotate the trailing 2*P channels of each head as interleaved pairs; a drop-in for transformers' function.

    Channels 2i and 2i+1 of the rotary part become (even*cos - odd*sin, odd*cos + even*sin), computed in float32
    (float64 for float64 x) and rounded once. Leading channels are copied bit for bit. Differentiable in x by the
    conjugate rotation; nothing of x is saved. cos and sin get no gradient.

    Args:
        x: [B, H, T, D] for `unsqueeze_dim=1`, [B, T, H, D] for `unsqueeze_dim=2`; float16, bfloat16, float32 or
            float64; any strides, so the model's transposed view is read in place.
        cos, sin: [B or 1, T or 1, P] with 2*P <= D, one entry a pair, of one float dtype (fp32 tables are used as fp32).
        unsqueeze_dim: the dimension of heads in x, 1 or 2.
        inverse: rotate by the negative angle.

    Returns:
        A fresh contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: an argument is no float tensor, or cos and sin differ in dtype.
        ValueError: a wrong number of dimensions, `unsqueeze_dim` other than 1 or 2, 2*P > D, sizes that don't
            broadcast, or tensors on different devices.
        NotImplementedError: no backend covers the device; says why for each.

    Source: DeepSeek-V4 inference code `apply_rotary_emb`; transformers `modeling_deepseek_v4.apply_rotary_pos_emb`.
    """
    _check_flags(unsqueeze_dim, inverse)
    return _rotate(x, cos, sin, unsqueeze_dim, inverse, False)


def apply_rotary_pos_emb_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1, *, inverse: bool = False
) -> torch.Tensor:
    """`apply_rotary_pos_emb` in place: reads and writes the rotary channels of x alone, and returns x.

    Arguments and errors as there; in addition x must not overlap itself (an expanded view), the memory that
    cos or sin span, nor be a leaf that requires grad, a lazily negated view, or an inference tensor outside inference mode
    (ValueError). Autograd sees an ordinary in-place operation: x's version counter moves.
    """
    _check_flags(unsqueeze_dim, inverse)
    needs_grad = torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad
    if is_eager(x, cos, sin) and not needs_grad:
        _rope_(x, cos, sin, unsqueeze_dim, inverse)
        return x
    _check(x, cos, sin, unsqueeze_dim)
    refuse_forward_ad(x=x, cos=cos, sin=sin)
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError("x is a lazily negated view and can't be rotated in place; pass x.resolve_neg()")
    if needs_grad:
        if x.is_leaf:
            raise ValueError("x is a leaf that requires grad and can't be rotated in place; pass a clone or use torch.no_grad")
        return _RopeInPlace.apply(x, cos, sin, unsqueeze_dim, inverse)
    ops.rope_(x, cos, sin, unsqueeze_dim, inverse)
    return x


def _check_flags(unsqueeze_dim, inverse):
    # Exact types: True and 1.0 would find what was prepared for 1.
    if type(unsqueeze_dim) is not int or unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 (x is [B, H, T, D]) or 2 (x is [B, T, H, D]), got {unsqueeze_dim!r}")
    if type(inverse) is not bool:
        raise TypeError(f"inverse must be True or False, got {inverse!r}")


def _check(x, cos, sin, unsqueeze_dim):
    check_float("x", x)
    check_float("cos", cos)
    check_float("sin", sin)
    if sin.dtype != cos.dtype:
        raise TypeError(f"cos is {cos.dtype} and sin is {sin.dtype}; both must have one dtype")
    check_same_device("cos", cos, "x", x)
    check_same_device("sin", sin, "x", x)
    if x.dim() != 4:
        raise ValueError(f"x must have 4 dimensions, got shape {tuple(x.shape)}")
    if cos.dim() != 3 or cos.shape != sin.shape:
        raise ValueError(f"cos and sin must be [B or 1, T or 1, P], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    batch, tokens, width = x.shape[0], x.shape[3 - unsqueeze_dim], x.shape[3]
    if cos.shape[0] not in (1, batch) or cos.shape[1] not in (1, tokens):
        raise ValueError(
            f"cos and sin of shape {tuple(cos.shape)} don't broadcast to [{batch}, {tokens}, P], "
            f"the batch and tokens of x {tuple(x.shape)} with unsqueeze_dim={unsqueeze_dim}"
        )
    if not 0 < 2 * cos.shape[2] <= width:
        raise ValueError(f"cos and sin hold {cos.shape[2]} pairs, which is not between 1 and half of x's {width} channels")


def _rotate(x, cos, sin, unsqueeze_dim, inverse, transposed):
    if is_eager(x, cos, sin):
        if x.requires_grad and torch.is_grad_enabled():
            return _Rope.apply(x, cos, sin, unsqueeze_dim, inverse, transposed)
        return _rope(x, cos, sin, unsqueeze_dim, inverse, transposed)
    _check(x, cos, sin, unsqueeze_dim)
    refuse_forward_ad(x=x, cos=cos, sin=sin)
    return ops.rope(x, cos, sin, unsqueeze_dim, inverse, transposed)


def _rope(x, cos, sin, unsqueeze_dim, inverse, transposed):
    key = _key(x, cos, sin, unsqueeze_dim, inverse, transposed)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        _check(x, cos, sin, unsqueeze_dim)
        backend, out = BACKENDS.choose(x), _empty(x, transposed)
        launch = BACKENDS.remember(key, backend.prepare_rope(x, cos, sin, unsqueeze_dim, inverse, out))
    out = _empty(x, transposed)
    launch(x, cos, sin, out)
    return out


def _rope_(x, cos, sin, unsqueeze_dim, inverse):
    key = _key(x, cos, sin, unsqueeze_dim, inverse, "in place")
    call = BACKENDS.prepared.get(key)
    if call is None:
        _check(x, cos, sin, unsqueeze_dim)
        # Not in the public function: under torch.compile the comparison of strides would be a guard per length.
        if overlaps_itself(x):
            raise ValueError(f"x may overlap itself (strides {tuple(x.stride())}) and can't be rotated in place")
        call = BACKENDS.remember(key, _prepare_in_place(x, cos, sin, unsqueeze_dim, inverse))
    call(x, cos, sin)


def _prepare_in_place(x, cos, sin, unsqueeze_dim, inverse):
    launch = BACKENDS.choose(x).prepare_rope(x, cos, sin, unsqueeze_dim, inverse, x)
    x_span, cos_span, sin_span = span(x), span(cos), span(sin)

    def call(x, cos, sin):
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("x was made in inference mode and can't be rotated in place outside of it; pass a clone")
        start = x.data_ptr()
        for name, table, table_span in (("cos", cos.data_ptr(), cos_span), ("sin", sin.data_ptr(), sin_span)):
            if start < table + table_span and table < start + x_span:
                raise ValueError(f"{name} may share memory with x, which would be overwritten while it is read")
        launch(x, cos, sin, x)
        # A kernel's write is invisible to autograd, which must know that what it saved of x is gone.
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)

    return call


def _key(x, cos, sin, *rest):
    """All that the checks and the launch depend on but the data and its alignment."""
    # get_device() and not .device: an int instead of an object for each, 1 us less for making, hashing and comparing.
    try:
        return (
            *(x.shape, x.stride(), x.dtype, x.get_device(), cos.shape, cos.stride(), cos.dtype, cos.get_device()),
            *(sin.shape, sin.stride(), sin.dtype, sin.get_device(), *rest),
        )
    except RuntimeError:  # no strides: a sparse or nested tensor, of which the check says more
        _check(x, cos, sin, rest[0])
        raise


def _empty(x, transposed):
    """A fresh tensor like x, contiguous, or with dimensions 1 and 2 swapped in memory."""
    if transposed:
        batch, outer, inner, width = x.shape
        return torch.empty_strided(
            x.shape, (outer * inner * width, width, outer * width, 1), dtype=x.dtype, device=x.device
        )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, x, cos, sin, unsqueeze_dim, inverse):
    ctx.unsqueeze_dim, ctx.inverse = unsqueeze_dim, inverse
    # dx goes to the memory order of x: the view's backward then needs no copy before the projection's GEMM.
    ctx.transposed = x.stride(1) < x.stride(2)
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dout):
    cos, sin = ctx.saved_tensors
    rotate = ops.rope if is_batched(dout) else _rotate
    return rotate(dout, cos, sin, ctx.unsqueeze_dim, not ctx.inverse, ctx.transposed), None, None, None, None, None


class _Rope(torch.autograd.Function):
    """The registered op's autograd formula without the dispatcher."""

    @staticmethod
    def forward(ctx, x, cos, sin, unsqueeze_dim, inverse, transposed):
        out = _rope(x, cos, sin, unsqueeze_dim, inverse, transposed)
        _save(ctx, x, cos, sin, unsqueeze_dim, inverse)
        return out

    backward = staticmethod(_backward)


class _RopeInPlace(torch.autograd.Function):
    """torch.library takes no autograd formula for an op that mutates its input."""

    @staticmethod
    def forward(ctx, x, cos, sin, unsqueeze_dim, inverse):
        _save(ctx, x, cos, sin, unsqueeze_dim, inverse)
        ctx.mark_dirty(x)
        ops.rope_(x, cos, sin, unsqueeze_dim, inverse)
        return x

    @staticmethod
    def backward(ctx, dout):
        return _backward(ctx, dout)[:5]


DEVICES = ("cpu", "cuda", "xpu")

torch.library.define(
    add_op_namespace_prefix("rope"),
    "(Tensor x, Tensor cos, Tensor sin, int unsqueeze_dim, bool inverse, bool transposed) -> Tensor",
)
torch.library.impl(add_op_namespace_prefix("rope"), DEVICES, _rope)
torch.library.register_fake(
    add_op_namespace_prefix("rope"), lambda x, cos, sin, unsqueeze_dim, inverse, transposed: _empty(x, transposed)
)
torch.library.register_autograd(
    add_op_namespace_prefix("rope"), _backward, setup_context=lambda ctx, inputs, output: _save(ctx, *inputs[:5])
)

torch.library.define(
    add_op_namespace_prefix("rope_"), "(Tensor(a!) x, Tensor cos, Tensor sin, int unsqueeze_dim, bool inverse) -> ()"
)
torch.library.impl(add_op_namespace_prefix("rope_"), DEVICES, _rope_)
torch.library.register_fake(add_op_namespace_prefix("rope_"), lambda x, cos, sin, unsqueeze_dim, inverse: None)
