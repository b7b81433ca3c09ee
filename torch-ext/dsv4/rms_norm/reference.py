"""RMSNorm in plain torch: the definition, and the CPU backend.

Source: Zhang & Sennrich 2019, eq. 4; the three rounding orders are those of transformers' `modeling_deepseek_v4`.
"""

import torch


def why_not(x, *_):
    return None if x.device.type == "cpu" else "the reference serves CPU tensors only"


def rms_norm(x, weight, eps, rounding):
    """Differentiable; float64 inside for float64 x, else float32."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.rsqrt(x.to(acc).square().mean(-1, keepdim=True) + eps)
    if rounding == "scale":
        return x * scale.to(x.dtype)
    normalized = x.to(acc) * scale
    if weight is None:
        return normalized.to(x.dtype)
    if rounding == "normalized":
        return weight * normalized.to(x.dtype)
    return (weight.to(acc) * normalized).to(x.dtype)


def rms_norm_backward(x, weight, dout, eps):
    """dx = r * (w dout - x r^2 mean(w dout x)), dweight = sum over rows of dout x r, with r = rsqrt(mean(x^2) + eps)."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    dout, x_acc = dout.to(acc), x.to(acc)
    scale = torch.rsqrt(x_acc.square().mean(-1, keepdim=True) + eps)
    weighted = dout if weight is None else dout * weight.to(acc)
    dx = scale * (weighted - x_acc * scale.square() * (weighted * x_acc).mean(-1, keepdim=True))
    return dx, (dout * x_acc * scale).reshape(-1, x.shape[-1]).sum(0)


def prepare_forward(x, weight, out, eps, rounding):
    return lambda x, weight, out: out.copy_(rms_norm(x, weight, eps, rounding))


def prepare_backward(x, weight, dout, dx, dweight, eps):
    def call(x, weight, dout, dx, dweight):
        grads = rms_norm_backward(x, weight, dout, eps)
        dx.copy_(grads[0])
        if dweight.numel():
            dweight.copy_(grads[1])

    return call
