"""Gated pooling of token windows into compressed KV entries, in plain torch: the definition, and the CPU backend.

Source: DeepSeek-V4 paper 2.3.1 (eqs. 9-17) and 2.3.2 (eqs. 20-23); the rounding points of numerics "transformers" are
those of transformers' `DeepseekV4CSACompressor` and `DeepseekV4HCACompressor` since 5.20.
"""

import torch


def why_not(kv, *_):
    return None if kv.device.type == "cpu" else "the reference serves CPU tensors only"


def compress_kv(
    kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, rate, overlap, eps, numerics
):
    """Differentiable; float64 inside for float64 kv, else float32."""
    acc = _acc(kv)
    # A rounding point is a cast to kv's dtype: the logit (to the wider of gate's and the bias's), the weight, each product,
    # their sum, the norm's result and the rotation's. In official numerics there is none but the last.
    rounded = kv.dtype if numerics == "transformers" else acc
    pooled = _pool(*_slots(kv, gate, position_bias, previous_kv, previous_gate, rate, overlap, numerics), rounded)
    scale = torch.rsqrt(pooled.to(acc).square().mean(-1, keepdim=True) + eps)
    normed = (norm_weight.to(acc) * (pooled.to(acc) * scale)).to(pooled.dtype)
    return _rope(normed, cos, sin, acc).to(kv.dtype)


def compress_kv_backward(
    dout, kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, pooled, rate, overlap, eps, numerics
):
    """Gradients of kv, gate, position_bias, norm_weight, previous_kv and previous_gate, in fp32 from unrounded `pooled`."""
    acc, width, windows = _acc(kv), pooled.shape[-1], pooled.shape[1]
    # rope: the turn back
    dnormed = _rope(dout.to(acc), cos, -sin, acc)
    # norm: dpooled = scale * (weighted - normalized * mean(weighted * normalized))
    scale = torch.rsqrt(pooled.to(acc).square().mean(-1, keepdim=True) + eps)
    normalized = pooled.to(acc) * scale
    weighted = dnormed * norm_weight.to(acc)
    dpooled = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
    # pool: with m = sum of w kv, dkv = w dpooled and dlogit = w (kv - m) dpooled
    slots, logits = _slots(kv, gate, position_bias, previous_kv, previous_gate, rate, overlap, numerics)
    slots, weights = slots.to(acc), logits.softmax(2, dtype=acc)
    dslots = weights * dpooled[:, :, None]
    dlogits = dslots * (slots - (weights * slots).sum(2, keepdim=True))

    dkv, dgate = (torch.zeros(kv.shape, dtype=acc).unflatten(1, (windows, rate)) for _ in range(2))
    dprevious_kv = dprevious_gate = None
    if overlap:
        for grad, slot_grad in ((dkv, dslots), (dgate, dlogits)):
            grad[..., width:] = slot_grad[:, :, rate:]
            grad[:, :-1, :, :width] = slot_grad[:, 1:, :rate]
        if previous_kv is not None:
            before = slice(0, 1) if windows else slice(0, 0)
            dprevious_kv, dprevious_gate = (grad[:, before, :rate].sum(1) for grad in (dslots, dlogits))
    else:
        dkv, dgate = dslots, dlogits
    dposition_bias, dnorm_weight = dgate.sum((0, 1)), (dnormed * normalized).sum((0, 1))
    return dkv.flatten(1, 2), dgate.flatten(1, 2), dposition_bias, dnorm_weight, dprevious_kv, dprevious_gate


def _acc(kv):
    return torch.float64 if kv.dtype == torch.float64 else torch.float32


def _slots(kv, gate, position_bias, previous_kv, previous_gate, rate, overlap, numerics):
    """kv and logits of each window's slots, [B, W, rate or 2 * rate, D]; a slot that does not exist is 0 and -inf."""
    windows = kv.shape[1] // rate
    kv, gate = (x.unflatten(1, (windows, rate)) for x in (kv, gate))
    if numerics == "official":
        gate, position_bias = gate.to(_acc(kv)), position_bias.to(_acc(kv))
    logits = gate + position_bias
    if overlap:
        kv, logits = _overlap(kv, previous_kv, 0.0), _overlap(logits, previous_gate, float("-inf"))
    # Weight 0 must not meet an Inf or a NaN in a state that holds nothing yet.
    return kv.masked_fill(logits == float("-inf"), 0.0), logits


def _pool(kv, logits, rounded):
    """Softmax over the slots, per channel, and the weighted sum with weights, products and sum in `rounded`: [B, W, D]."""
    return (kv.to(rounded) * logits.softmax(2, dtype=_acc(kv)).to(rounded)).sum(2)


def _overlap(x, previous, fill):
    """The previous window's first series, then the window's second one."""
    batch, windows, rate, channels = x.shape
    width = channels // 2
    before = x.new_full((batch, 1, rate, width), fill) if previous is None else previous.to(x.dtype)[:, None]
    first = torch.cat((before, x[:, :-1, :, :width]), 1)[:, :windows]
    return torch.cat((first, x[..., width:]), 2)


def _rope(x, cos, sin, acc):
    """Rotate the trailing channels of [B, W, D] as interleaved pairs."""
    cos, sin = cos.to(acc), sin.to(acc)
    nope = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., nope::2].to(acc), x[..., nope + 1 :: 2].to(acc)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :nope], rotated.to(x.dtype)), -1)


def prepare_forward(tensors, entries, pooled, rate, overlap, eps, numerics):
    def call(tensors, entries, pooled):
        kv, gate, position_bias, _, _, _, *previous = tensors
        entries.copy_(compress_kv(*tensors, rate, overlap, eps, numerics))
        if pooled is not None:
            pooled.copy_(_pool(*_slots(kv, gate, position_bias, *previous, rate, overlap, numerics), _acc(kv)))

    return call


def prepare_backward(dout, tensors, pooled, grads, rate, overlap, eps, numerics):
    def call(dout, tensors, pooled, grads):
        results = compress_kv_backward(dout, *tensors, pooled, rate, overlap, eps, numerics)
        for grad, result in zip(grads, results, strict=True):
            if result is not None and grad.shape == result.shape:
                grad.copy_(result)

    return call
