"""Walsh-Hadamard transform in Triton: one pass, a row stays in registers through all its butterflies."""

import torch
import triton
import triton.language as tl

from ..common.device import why_not_triton
from ..common.launch import prepare_launch
from ..common.rows import MAX_DIMS, merge_rows, pad_dims
from ..common.tiles import follow_previous_kernel, row_offset
from .configs import choose_config


def why_not(x, out):
    if len(_merge(x, out)[0]) > MAX_DIMS:
        return f"the leading dimensions (strides {x.stride()[:-1]}) don't merge into {MAX_DIMS}"
    return why_not_triton(x)


def prepare_transform(x, out, scale):
    """A launch that writes the transform of x to `out`."""
    if x.numel() == 0:
        return lambda x, out: None
    sizes, x_rows, out_rows = (pad_dims(dims, fill) for dims, fill in zip(_merge(x, out), (1, 0, 0)))
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    config = choose_config(width)
    return prepare_launch(
        _transform_kernel,
        triton.cdiv(rows, config.rows),
        (rows, sizes[1], sizes[2], *x_rows, x.stride(-1), *out_rows, out.stride(-1), float(scale)),
        dict(
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            ROWS=config.rows,
            WIDTH=width,
            STAGES=width.bit_length() - 1,
        ),
        x.device,
        num_warps=config.num_warps,
    )


def _merge(x, out):
    return merge_rows(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])


@triton.jit
def _butterfly(y, HALF: tl.constexpr):
    """Sums and differences of the entries of each row that are HALF apart."""
    # left, right = y.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
    pair = tl.reshape(y, [y.numel // (2 * HALF), 2, HALF])
    # The other one of a pair: as integers that wrap around, their sum minus oneself. It is exact, one shuffle where the
    # two lie in different threads, and a sum is what the interpreter is quick at.
    bits = pair.to(tl.int64 if y.dtype == tl.float64 else tl.int32, bitcast=True)
    other = (tl.sum(bits, 1, keep_dims=True) - bits).to(y.dtype, bitcast=True)
    # y = stack((left + right, left - right), -2); the product is exact, so that fusing it with the sum changes no bit
    sign = (1 - 2 * tl.arange(0, 2)).to(y.dtype)[None, :, None]
    return tl.reshape(sign * pair + other, y.shape)


@triton.jit(do_not_specialize=["rows", "size1", "size2"])
def _transform_kernel(
    x_ptr,  # [rows, D], rows in three dimensions
    out_ptr,  # [rows, D]
    rows,
    size1,
    size2,
    x_0,
    x_1,
    x_2,
    x_channel,
    out_0,
    out_1,
    out_2,
    out_channel,
    scale: tl.float64,  # of Python's precision: fp64 rows take it whole
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,  # log2(WIDTH)
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    follow_previous_kernel(PDL)
    x_row = x_ptr + row_offset(row, size1, size2, x_0, x_1, x_2)
    y = tl.load(x_row + col * x_channel, mask=row < rows, other=0.0).to(ACC)
    for stage in tl.static_range(STAGES):
        y = _butterfly(y, 1 << stage)
    out_row = out_ptr + row_offset(row, size1, size2, out_0, out_1, out_2)
    tl.store(out_row + col * out_channel, (y * scale).to(out_ptr.dtype.element_ty), mask=row < rows)
