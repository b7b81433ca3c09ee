"""Rotary embedding in Triton: one pass, each element read once and written once."""

import torch
import triton
import triton.language as tl

from ..common.device import why_not_triton
from ..common.launch import prepare_launch
from ..common.tiles import follow_previous_kernel
from .configs import MAX_WIDTH, choose_config


def why_not(x, *_):
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of {x.shape[-1]} channels are wider than {MAX_WIDTH}"
    return why_not_triton(x)


def prepare_rope(x, cos, sin, unsqueeze_dim, inverse, out):
    """A launch that writes rope(x) to `out`, of x's shape; with `out is x` only the rotary channels are touched."""
    if x.numel() == 0:
        return lambda x, cos, sin, out: None
    head_dim, token_dim = (1, 2) if unsqueeze_dim == 1 else (2, 1)
    batch, heads, tokens, width = x.shape[0], x.shape[head_dim], x.shape[token_dim], x.shape[3]
    nope = width - 2 * cos.shape[2]
    # Columns start at a whole number of pairs before the rotary part: at 0, at -1 (masked) if `nope` is odd.
    first = nope if out is x else -(nope % 2)
    config = choose_config(heads, width - first, x.element_size())
    head_tiles, token_tiles = triton.cdiv(heads, config.heads), triton.cdiv(tokens, config.tokens)
    channel_strides = (x.stride(3), out.stride(3), cos.stride(2), sin.stride(2))
    strides = [tensor.stride(dim) for tensor in (x, out) for dim in (0, token_dim, head_dim, 3)]
    return prepare_launch(
        _rope_kernel,
        batch * token_tiles * head_tiles,
        (
            *(heads, tokens, head_tiles, token_tiles, width, cos.shape[2], first, (first - nope) // 2),
            *strides,
            *_table_strides(cos),
            *_table_strides(sin),
        ),
        dict(
            INVERSE=inverse,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            TOKENS=config.tokens,
            HEADS=config.heads,
            PAIRS=config.pairs,
            WIDE=width * max(channel_strides) >= 2**31,
        ),
        x.device,
        num_warps=config.num_warps,
        # Each product is rounded, as in transformers' eager code. Fused, variants for other layouts differed in bits.
        enable_fp_fusion=False,
    )


def _table_strides(table):
    """Strides of a [B or 1, T or 1, P] table, 0 where it is broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(table.shape[:2], table.stride())] + [table.stride(2)]


@triton.jit(do_not_specialize=["heads", "tokens", "head_tiles", "token_tiles"])
def _rope_kernel(
    x_ptr,  # [B, T, H, D], in any layout
    cos_ptr,  # [B, T, P]
    sin_ptr,  # [B, T, P]
    out_ptr,  # [B, T, H, D]
    heads,  # H
    tokens,  # T
    head_tiles,
    token_tiles,
    width,  # D
    pairs,  # P
    first_col,  # column of the tile's first channel; -1 when D - 2P is odd
    first_pair,  # pair of the tile's first channel; negative before the rotary channels
    x_batch,
    x_token,
    x_head,
    x_channel,
    out_batch,
    out_token,
    out_head,
    out_channel,
    cos_batch,
    cos_token,
    cos_pair,
    sin_batch,
    sin_token,
    sin_pair,
    INVERSE: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads vary fastest: neighbouring programs read one token's heads, which lie together in the model's memory.
    tile = tl.program_id(0)
    position = tile // head_tiles
    head = ((tile % head_tiles) * HEADS + tl.arange(0, HEADS))[None, :, None]
    token = ((position % token_tiles) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    # 64-bit before any product with a stride: 64 heads x 512 channels x 65,536 tokens is 2^31.
    batch = (position // token_tiles).to(tl.int64)
    head_64, token_64 = head.to(tl.int64), token.to(tl.int64)

    col = (first_col + tl.arange(0, 2 * PAIRS))[None, None, :]
    pair = (first_pair + tl.arange(0, PAIRS))[None, None, :]
    # Channels that lie 2^31 elements apart, in a channels-first tensor, are rare; 64 bits for all would cost registers.
    if WIDE:
        col, pair = col.to(tl.int64), pair.to(tl.int64)
    mask = (token < tokens) & (head < heads) & (col >= 0) & (col < width)
    follow_previous_kernel(PDL)
    x_row = x_ptr + batch * x_batch + token_64 * x_token + head_64 * x_head
    x = tl.load(x_row + col * x_channel, mask=mask)

    rotary = (token < tokens) & (pair >= 0) & (pair < pairs)
    cos = tl.load(cos_ptr + batch * cos_batch + token_64 * cos_token + pair * cos_pair, mask=rotary).to(ACC)
    sin = tl.load(sin_ptr + batch * sin_batch + token_64 * sin_token + pair * sin_pair, mask=rotary).to(ACC)
    # if inverse: sin = -sin
    if INVERSE:
        sin = -sin

    # even, odd = x[..., nope::2], x[..., nope + 1 :: 2]
    even, odd = tl.split(tl.reshape(x, [TOKENS, HEADS, PAIRS, 2]))
    even_acc, odd_acc = even.to(ACC), odd.to(ACC)
    # rotated = (even * cos - odd * sin, odd * cos + even * sin); the leading channels pass through bit for bit
    new_even = tl.where(rotary, (even_acc * cos - odd_acc * sin).to(x.dtype), even)
    new_odd = tl.where(rotary, (odd_acc * cos + even_acc * sin).to(x.dtype), odd)
    out = tl.reshape(tl.join(new_even, new_odd), [TOKENS, HEADS, 2 * PAIRS])
    out_row = out_ptr + batch * out_batch + token_64 * out_token + head_64 * out_head
    tl.store(out_row + col * out_channel, out, mask=mask)
