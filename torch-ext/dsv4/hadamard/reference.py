"""Walsh-Hadamard transform in plain torch: the definition, and the CPU backend.

Source: the natural (Sylvester) order of `scipy.linalg.hadamard`: H_1 = [1], H_2n = [[H_n, H_n], [H_n, -H_n]].
"""

import torch


def why_not(x, *_):
    return None if x.device.type == "cpu" else "the reference serves CPU tensors only"


def hadamard_transform(x, scale):
    """Differentiable; float64 inside for float64 x, else float32."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    width, half = x.shape[-1], 1
    while half < width:
        left, right = y.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
        y = torch.stack((left + right, left - right), -2).flatten(-3)
        half *= 2
    return (y * scale).to(x.dtype)


def prepare_transform(x, out, scale):
    return lambda x, out: out.copy_(hadamard_transform(x, scale))
