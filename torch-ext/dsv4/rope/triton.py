"""Rotary embedding in Triton: one pass, each element read once and written once."""

import torch
import triton
import triton.language as tl

from ..common import device
from .configs import choose_config


def why_not(x, cos, sin):
    return device.why_not_triton(x)


def rope_into(out, x, cos, sin, unsqueeze_dim, inverse):
    """Write rope(x) to `out`, which has x's shape; with `out is x` only the rotary channels are touched."""
    if x.numel() == 0:
        return
    head_dim, token_dim = (1, 2) if unsqueeze_dim == 1 else (2, 1)
    batch, heads, tokens, width = x.shape[0], x.shape[head_dim], x.shape[token_dim], x.shape[3]
    nope = width - 2 * cos.shape[2]
    # Columns start at a whole number of pairs before the rotary part: at 0, at -1 (masked) if `nope` is odd.
    first = nope if out is x else -(nope % 2)
    config = choose_config(width - first, x.element_size())
    rows = batch * heads * tokens
    x_strides, out_strides = x.stride(), out.stride()
    with device.launch_on(x):
        _rope_kernel[(triton.cdiv(rows, config.rows),)](
            x,
            cos,
            sin,
            out,
            rows,
            heads,
            tokens,
            width,
            cos.shape[2],
            first,
            (first - nope) // 2,
            x_strides[0],
            x_strides[token_dim],
            x_strides[head_dim],
            x_strides[3],
            out_strides[0],
            out_strides[token_dim],
            out_strides[head_dim],
            out_strides[3],
            *_table_strides(cos),
            *_table_strides(sin),
            INVERSE=inverse,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            ROWS=config.rows,
            PAIRS=config.pairs,
            num_warps=config.num_warps,
        )


def _table_strides(table):
    """Strides of a [B or 1, T or 1, P] table, 0 where it is broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(table.shape[:2], table.stride())] + [table.stride(2)]


@triton.jit(do_not_specialize=["rows", "heads", "tokens"])
def _rope_kernel(
    x_ptr,  # [B, T, H, D], in any layout
    cos_ptr,  # [B, T, P]
    sin_ptr,  # [B, T, P]
    out_ptr,  # [B, T, H, D]
    rows,  # B * T * H
    heads,
    tokens,
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
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # Heads vary fastest: a tile reads one token's heads, which lie together in the model's [B, T, H, D] memory.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < rows)[:, None]
    position = row // heads
    # 64-bit before any product with a stride: 64 heads x 512 channels x 65,536 tokens is 2^31.
    head = (row % heads).to(tl.int64)[:, None]
    token = (position % tokens).to(tl.int64)[:, None]
    batch = (position // tokens).to(tl.int64)[:, None]

    col = (first_col + tl.arange(0, 2 * PAIRS))[None, :]
    mask = in_rows & (col >= 0) & (col < width)
    x_row = x_ptr + batch * x_batch + token * x_token + head * x_head
    x = tl.load(x_row + col * x_channel, mask=mask)

    pair = (first_pair + tl.arange(0, PAIRS))[None, :]
    rotary = in_rows & (pair >= 0) & (pair < pairs)
    cos = tl.load(cos_ptr + batch * cos_batch + token * cos_token + pair * cos_pair, mask=rotary).to(ACC)
    sin = tl.load(sin_ptr + batch * sin_batch + token * sin_token + pair * sin_pair, mask=rotary).to(ACC)
    # if inverse: sin = -sin
    if INVERSE:
        sin = -sin

    # even, odd = x[..., nope::2], x[..., nope + 1 :: 2]
    even, odd = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    even_acc, odd_acc = even.to(ACC), odd.to(ACC)
    # rotated = (even * cos - odd * sin, odd * cos + even * sin); the leading channels pass through bit for bit
    new_even = tl.where(rotary, (even_acc * cos - odd_acc * sin).to(x.dtype), even)
    new_odd = tl.where(rotary, (odd_acc * cos + even_acc * sin).to(x.dtype), odd)
    out = tl.reshape(tl.join(new_even, new_odd), [ROWS, 2 * PAIRS])
    out_row = out_ptr + batch * out_batch + token * out_token + head * out_head
    tl.store(out_row + col * out_channel, out, mask=mask)
