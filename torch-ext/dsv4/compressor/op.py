"""Compressed KV entries: public function, registered ops, autograd."""

import math

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_float, check_same_device
from ..common.dispatch import Backends
from ..common.eager import is_batched, is_eager, refuse_forward_ad

BACKENDS = Backends(__package__, "triton", "reference")
NUMERICS = ("transformers", "official")
_NAMES = ("kv", "gate", "position_bias", "norm_weight", "cos", "sin", "previous_kv", "previous_gate")


def compress_kv(
    kv: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rate: int,
    overlap: bool,
    eps: float,
    previous_kv: torch.Tensor | None = None,
    previous_gate: torch.Tensor | None = None,
    numerics: str = "transformers",
) -> torch.Tensor:
    """Pool each window of `rate` tokens into one entry: softmax-gated sum, RMSNorm, rope at the window's start.

    Per channel, an entry is the sum over the window's slots of softmax(gate + position_bias) * kv. Without overlap
    (HCA) the slots are the window's tokens. With overlap (CSA) kv and gate hold two series of D channels: the slots are
    the previous window's tokens in the first series, then the window's own in the second. Differentiable but for cos and
    sin; sums over windows have a fixed order. An entry depends on its slots alone, so that every chunking gives the same.

    The caller's state between two calls, for W > 0 windows in this one (none of it changes with W = 0):
        the unfinished window: kv and gate of the tokens behind the last whole window, to stand before the next call's;
        with overlap, previous_kv = kv[:, -rate:, :D] and previous_gate = gate[:, -rate:, :D] + position_bias[:, :D].
    transformers' caches hold just these: `buffer_kv`, `buffer_gate`, `overlap_kv` and, bias included, `overlap_gate`.

    Args:
        kv, gate: [B, W * rate, D], or [B, W * rate, 2 * D] with overlap; one dtype, float16, bfloat16, float32 or
            float64; any strides. With adjacent channels, as columns of a fused projection have, they are read in place.
        position_bias: [rate, channels of kv], added to the gates of a window's tokens.
        norm_weight: [D], D even; the RMSNorm's.
        cos, sin: [B or 1, W, P] with 2*P <= D, of one float dtype, at the windows' first tokens. The trailing 2*P
            channels are rotated as interleaved pairs.
        rate: tokens a window.
        overlap: whether kv and gate hold two series.
        eps: added to the mean square.
        previous_kv, previous_gate: [B, rate, D], the first window's slots of the first series, see above. Without them,
            or where previous_gate is -inf, those slots have weight 0 and previous_kv does not count, be it NaN.
        numerics: "transformers" rounds to kv's dtype as its modules do since 5.20: the weights, each product, their sum,
            the normed entry and the rotated channels, and gate + position_bias where both are of kv's dtype.
            "official" computes in float32 and rounds once. Both in float64 for float64 kv; the backward rounds once.

    Returns:
        [B, W, D] of kv's dtype, fresh and contiguous.

    Raises:
        TypeError: an argument is no dense float tensor, gate's dtype is not kv's or sin's not cos's, rate is no int,
            overlap no bool, or eps no float.
        ValueError: shapes that don't fit together, a token count that is no multiple of `rate`, an odd D, one of
            previous_kv and previous_gate without the other or without overlap, tensors on different devices, unknown
            numerics, or an eps that is negative or not finite.
        NotImplementedError: no backend covers the call; says why for each.

    Source: DeepSeek-V4 paper 2.3.1 and 2.3.2; transformers `modeling_deepseek_v4.DeepseekV4CSACompressor`, `...HCACompressor`.
    """
    tensors = (kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate)
    options = (rate, overlap, _check_flags(rate, overlap, eps, numerics), numerics)
    if not is_eager(*tensors[:6], *(tensor for tensor in tensors[6:] if tensor is not None)):
        _check(*tensors, *options)
        refuse_forward_ad(**dict(zip(_NAMES, tensors)))
        return ops.compress_kv(*tensors, *options, _needs_grad(tensors))[0]
    if _needs_grad(tensors):
        return _CompressKV.apply(*tensors, *options)
    return _compress_kv(*tensors, *options, False)[0]


def _check_flags(rate, overlap, eps, numerics):
    """eps as a float. Exact types: True and 1.0 would find what was prepared for 1."""
    if type(rate) is not int:
        raise TypeError(f"rate must be an int, got {rate!r}")
    if type(overlap) is not bool:
        raise TypeError(f"overlap must be True or False, got {overlap!r}")
    if type(eps) not in (int, float):
        raise TypeError(f"eps must be a float, got {eps!r}")
    if type(numerics) is not str or numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {', '.join(NUMERICS)}, got {numerics!r}")
    return float(eps)


def _check(kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, rate, overlap, eps, numerics):
    if (previous_kv is None) != (previous_gate is None):
        raise ValueError("previous_kv and previous_gate come together; one is None")
    tensors = (kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate)
    for name, tensor in list(zip(_NAMES, tensors))[: 6 if previous_kv is None else 8]:
        check_float(name, tensor)
        check_same_device(name, tensor, "kv", kv)
    for name, tensor, other_name, other in (("gate", gate, "kv", kv), ("sin", sin, "cos", cos)):
        if tensor.dtype != other.dtype:
            raise TypeError(f"{other_name} is {other.dtype} and {name} is {tensor.dtype}; both must have one dtype")
    if rate < 1:
        raise ValueError(f"rate must be at least 1, got {rate}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if kv.dim() != 3 or gate.shape != kv.shape:
        raise ValueError(f"kv and gate must be [B, W * rate, channels], got {tuple(kv.shape)} and {tuple(gate.shape)}")
    batch, tokens, channels = kv.shape
    if tokens % rate:
        raise ValueError(f"kv and gate hold {tokens} tokens, which is not a whole number of windows of rate={rate}")
    if norm_weight.dim() != 1 or norm_weight.shape[0] < 2 or norm_weight.shape[0] % 2:
        raise ValueError(f"norm_weight must be [D] with an even D, got {tuple(norm_weight.shape)}")
    width = norm_weight.shape[0]
    if channels != (2 * width if overlap else width):
        raise ValueError(
            f"kv and gate have {channels} channels; with overlap={overlap} and norm_weight of {width} "
            f"they must have {2 * width if overlap else width}"
        )
    if position_bias.shape != (rate, channels):
        raise ValueError(f"position_bias must be [rate, channels], ({rate}, {channels}), got {tuple(position_bias.shape)}")
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens // rate:
        raise ValueError(
            f"cos and sin must be [B or 1, W, P] for {batch} batch rows and {tokens // rate} windows, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not 0 < 2 * cos.shape[2] <= width:
        raise ValueError(f"cos and sin hold {cos.shape[2]} pairs, which is not between 1 and half of the {width} channels")
    if previous_kv is not None:
        if not overlap:
            raise ValueError("previous_kv and previous_gate are of an overlapping window; overlap is False")
        for name, tensor in (("previous_kv", previous_kv), ("previous_gate", previous_gate)):
            if tensor.shape != (batch, rate, width):
                raise ValueError(f"{name} must be [B, rate, D], ({batch}, {rate}, {width}), got {tuple(tensor.shape)}")


def _needs_grad(tensors):
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _compress_kv(
    kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, rate, overlap, eps, numerics, keep
):
    tensors = (kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate)
    options = (rate, overlap, eps, numerics)
    key = (*_key(tensors, tensors, options), *options, keep)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        _check(*tensors, *options)
        entries, pooled = _empty(kv, norm_weight, rate, keep)
        backend = BACKENDS.choose(kv, norm_weight, rate, overlap)
        launch = BACKENDS.remember(key, backend.prepare_forward(tensors, entries, pooled if keep else None, *options))
    entries, pooled = _empty(kv, norm_weight, rate, keep)
    launch(tensors, entries, pooled if keep else None)
    return entries, pooled


def _compress_kv_backward(dout, *inputs):
    tensors, pooled, options, parameters = inputs[:8], inputs[8], inputs[9:13], inputs[13]
    key = (*_key((dout, *tensors), tensors, options), *options, parameters)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        grads, backend = _empty_grads(tensors, parameters), BACKENDS.choose(tensors[0], tensors[3], *options[:2])
        launch = BACKENDS.remember(key, backend.prepare_backward(dout, tensors, pooled, grads, *options))
    grads = _empty_grads(tensors, parameters)
    launch(dout, tensors, pooled, grads)
    return grads


def _key(keyed, tensors, options):
    """All that the checks and the launch depend on but the data and its alignment."""
    key = []
    try:
        for tensor in keyed:
            key += (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    except RuntimeError:  # no strides: a sparse or nested tensor, of which the check says more
        _check(*tensors, *options)
        raise
    return key


def _empty(kv, norm_weight, rate, keep):
    """The entries, and the weighted sums before the norm, unrounded, which the backward alone needs."""
    shape = (kv.shape[0], kv.shape[1] // rate, norm_weight.shape[0])
    acc = torch.float64 if kv.dtype == torch.float64 else torch.float32
    return kv.new_empty(shape), kv.new_empty(shape if keep else 0, dtype=acc)


def _empty_grads(tensors, parameters):
    """For kv, gate, position_bias, norm_weight, previous_kv and previous_gate; of no elements where there is none, and for
    both parameters where nobody wants theirs: an op can't return None."""
    wanted = (True, True, parameters, parameters, tensors[6] is not None, tensors[6] is not None)
    return tuple(
        tensor.new_empty(tensor.shape) if want else tensors[0].new_empty(0)
        for want, tensor in zip(wanted, (*tensors[:4], *tensors[6:]))
    )


def _save(ctx, tensors, options, pooled):
    ctx.options = options
    ctx.save_for_backward(*tensors, pooled)


def _backward(ctx, dout, *_):
    *tensors, pooled = ctx.saved_tensors
    # With create_graph the dispatcher must see the op: its derivative is refused there.
    eager = is_eager(dout) and not is_batched(dout) and not torch.is_grad_enabled()
    parameters, state = any(ctx.needs_input_grad[2:4]), tensors[6] is not None
    backward = _compress_kv_backward if eager else ops.compress_kv_backward
    grads = backward(dout, *tensors, pooled, *ctx.options, parameters)
    return (
        *(*grads[:2], *(grads[2:4] if parameters else (None, None)), None, None),
        *(*(grads[4:] if state else (None, None)), None, None, None, None),
    )


class _CompressKV(torch.autograd.Function):
    """The registered op's autograd formula without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        entries, pooled = _compress_kv(*inputs, True)
        _save(ctx, inputs[:8], inputs[8:], pooled)
        return entries

    backward = staticmethod(_backward)


DEVICES = ("cpu", "cuda", "xpu")
_TENSORS = (
    "Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor cos, Tensor sin, "
    "Tensor? previous_kv, Tensor? previous_gate"
)
_OPTIONS = "int rate, bool overlap, float eps, str numerics"


def _setup(ctx, inputs, output):
    entries, pooled = output
    if not inputs[-1]:
        raise RuntimeError("compress_kv was called with keep=False, without what its backward needs")
    ctx.mark_non_differentiable(pooled)
    ctx.set_materialize_grads(False)
    _save(ctx, inputs[:8], inputs[8:12], pooled)


def _registered_backward(ctx, dout, dpooled):
    return *_backward(ctx, dout), None


torch.library.define(add_op_namespace_prefix("compress_kv"), f"({_TENSORS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor)")
torch.library.impl(add_op_namespace_prefix("compress_kv"), DEVICES, _compress_kv)
torch.library.register_fake(
    add_op_namespace_prefix("compress_kv"),
    lambda *inputs: _empty(inputs[0], inputs[3], inputs[8], inputs[12]),
)
torch.library.register_autograd(add_op_namespace_prefix("compress_kv"), _registered_backward, setup_context=_setup)

torch.library.define(
    add_op_namespace_prefix("compress_kv_backward"),
    f"(Tensor dout, {_TENSORS}, Tensor pooled, {_OPTIONS}, bool parameters) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl(add_op_namespace_prefix("compress_kv_backward"), DEVICES, _compress_kv_backward)
torch.library.register_fake(
    add_op_namespace_prefix("compress_kv_backward"), lambda dout, *inputs: _empty_grads(inputs[:8], inputs[13])
)


def _backward_twice(ctx, *_):
    raise NotImplementedError("compress_kv can be differentiated once; its backward has no derivative")


torch.library.register_autograd(add_op_namespace_prefix("compress_kv_backward"), _backward_twice)
