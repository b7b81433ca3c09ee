"""Partial interleaved rotary embedding in plain torch: the definition, and the CPU backend.

Source: DeepSeek-V4 inference code, `apply_rotary_emb` on the trailing `rope_head_dim` channels; transformers'
`modeling_deepseek_v4.apply_rotary_pos_emb` is the same function.
"""

import torch


def why_not(x, *_):
    return None if x.device.type == "cpu" else "the reference serves CPU tensors only"


def rope(x, cos, sin, unsqueeze_dim=1, inverse=False):
    """Differentiable in all arguments; float64 inside for float64 x, else float32."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table.to(acc).unsqueeze(unsqueeze_dim) for table in (cos, sin))
    if inverse:
        sin = -sin
    nope = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., nope::2].to(acc), x[..., nope + 1 :: 2].to(acc)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :nope], rotated.to(x.dtype)), -1)


def prepare_rope(x, cos, sin, unsqueeze_dim, inverse, out):
    return lambda x, cos, sin, out: out.copy_(rope(x, cos, sin, unsqueeze_dim, inverse))
