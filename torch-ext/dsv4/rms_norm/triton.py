"""RMSNorm in Triton: a row stays in registers, forward and backward read each input once."""

import torch
import triton
import triton.language as tl

from ..common import device
from ..common.rows import MAX_DIMS, merge_rows, pad_dims
from .configs import MAX_WIDTH, choose_config


def why_not(x, *others):
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of {x.shape[-1]} channels are wider than {MAX_WIDTH}"
    if len(_merge(x, *others)[0]) > MAX_DIMS:
        return f"the leading dimensions (strides {x.stride()[:-1]}) don't merge into {MAX_DIMS}"
    return device.why_not_triton(x)


def rms_norm_into(out, x, weight, eps, rounding):
    if x.numel() == 0:
        return
    sizes, x_rows, out_rows = (pad_dims(dims, fill) for dims, fill in zip(_merge(x, out), (1, 0, 0)))
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    config = choose_config(rows, width)
    with device.launch_on(x):
        _forward_kernel[(triton.cdiv(rows, config.rows),)](
            x,
            weight,
            out,
            rows,
            *sizes[1:],
            width,
            *x_rows,
            x.stride(-1),
            *out_rows,
            out.stride(-1),
            0 if weight is None else weight.stride(0),
            eps,
            ROUNDING=rounding,
            ACC=_acc(x),
            ROWS=config.rows,
            WIDTH=config.width,
            num_warps=config.num_warps,
        )


def rms_norm_backward_into(dx, dweight, dout, x, weight, eps):
    if x.numel() == 0:
        if weight is not None:
            dweight.zero_()
        return
    merged = _merge(x, dout, dx)
    sizes, x_rows, dout_rows, dx_rows = (pad_dims(dims, fill) for dims, fill in zip(merged, (1, 0, 0, 0)))
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    config = choose_config(rows, width, backward=True)
    tiles = triton.cdiv(rows, config.rows)
    if weight is None:
        programs, partial = tiles, None
    else:
        programs = config.programs
        partial = torch.empty(programs, width, dtype=_torch_acc(x), device=x.device)
    with device.launch_on(x):
        _backward_kernel[(programs,)](
            x,
            weight,
            dout,
            dx,
            partial,
            rows,
            *sizes[1:],
            width,
            triton.cdiv(tiles, programs),
            *x_rows,
            x.stride(-1),
            *dout_rows,
            dout.stride(-1),
            *dx_rows,
            dx.stride(-1),
            0 if weight is None else weight.stride(0),
            eps,
            ACC=_acc(x),
            ROWS=config.rows,
            WIDTH=config.width,
            num_warps=config.num_warps,
        )
    if weight is not None:
        # Each program owns fixed rows and torch.sum has a fixed order: the same bits on every run.
        dweight.copy_(partial.sum(0))


def _merge(*tensors):
    return merge_rows(tensors[0].shape[:-1], *(tensor.stride()[:-1] for tensor in tensors))


def _torch_acc(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _acc(x):
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _scale(x, width, eps, ACC: tl.constexpr):
    """rsqrt(mean(x^2) + eps) of each row, correctly rounded in fp32: the approximate rsqrt is off by up to 2 ulp."""
    mean_square = tl.sum(x * x, 1, keep_dims=True) / width + eps
    if ACC == tl.float32:
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square))
    else:
        return 1.0 / tl.sqrt(mean_square)


@triton.jit
def _row_offset(row, size1, size2, stride0, stride1, stride2):
    """Offset of each row, counted over three merged leading dimensions, innermost last. 64-bit before any product."""
    inner, middle, outer = row % size2, (row // size2) % size1, row // size2 // size1
    return outer.to(tl.int64) * stride0 + middle.to(tl.int64) * stride1 + inner.to(tl.int64) * stride2


@triton.jit(do_not_specialize=["rows", "size1", "size2"])
def _forward_kernel(
    x_ptr,  # [rows, D], rows in three dimensions
    weight_ptr,  # [D] or None
    out_ptr,  # [rows, D]
    rows,
    size1,
    size2,
    width,  # D
    x_0,
    x_1,
    x_2,
    x_channel,
    out_0,
    out_1,
    out_2,
    out_channel,
    weight_channel,
    eps,
    ROUNDING: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (col < width)
    x_row = x_ptr + _row_offset(row, size1, size2, x_0, x_1, x_2)
    x = tl.load(x_row + col * x_channel, mask=mask, other=0.0)
    x_acc = x.to(ACC)
    # scale = rsqrt(mean(x^2) + eps)
    scale = _scale(x_acc, width, eps, ACC)
    # rounding "scale": x * scale.to(x.dtype)
    if ROUNDING == "scale":
        scale = scale.to(x.dtype).to(ACC)
    normalized = x_acc * scale
    # rounding "normalized": weight * normalized.to(x.dtype)
    if ROUNDING == "normalized":
        normalized = normalized.to(x.dtype).to(ACC)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col * weight_channel, mask=col < width, other=0.0)
        normalized = weight.to(ACC) * normalized
    out_row = out_ptr + _row_offset(row, size1, size2, out_0, out_1, out_2)
    tl.store(out_row + col * out_channel, normalized.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "size1", "size2", "tiles_per_program"])
def _backward_kernel(
    x_ptr,  # [rows, D], rows in three dimensions
    weight_ptr,  # [D] or None
    dout_ptr,  # [rows, D]
    dx_ptr,  # [rows, D]
    partial_ptr,  # [programs, D] or None
    rows,
    size1,
    size2,
    width,  # D
    tiles_per_program,
    x_0,
    x_1,
    x_2,
    x_channel,
    dout_0,
    dout_1,
    dout_2,
    dout_channel,
    dx_0,
    dx_1,
    dx_2,
    dx_channel,
    weight_channel,
    eps,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, WIDTH)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col * weight_channel, mask=col < width, other=0.0).to(ACC)
        dweight = tl.zeros([1, WIDTH], ACC)
    for tile in range(tiles_per_program):
        row = ((program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (col < width)
        x_row = x_ptr + _row_offset(row, size1, size2, x_0, x_1, x_2)
        dout_row = dout_ptr + _row_offset(row, size1, size2, dout_0, dout_1, dout_2)
        x = tl.load(x_row + col * x_channel, mask=mask, other=0.0).to(ACC)
        dout = tl.load(dout_row + col * dout_channel, mask=mask, other=0.0).to(ACC)
        scale = _scale(x, width, eps, ACC)
        # Rows past the end are zeros: with eps 0 their scale is infinite and 0 * inf would reach dweight.
        normalized = tl.where(row < rows, x * scale, 0.0)
        # dweight = sum over rows of dout * x * scale
        if weight_ptr is not None:
            dweight += tl.sum(dout * normalized, 0, keep_dims=True)
            dout = dout * weight
        # dx = scale * (w dout - x scale^2 mean(w dout x))
        mean = tl.sum(dout * normalized, 1, keep_dims=True) / width
        dx = scale * (dout - normalized * mean)
        dx_row = dx_ptr + _row_offset(row, size1, size2, dx_0, dx_1, dx_2)
        tl.store(dx_row + col * dx_channel, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        tl.store(partial_ptr + program.to(tl.int64) * width + col, dweight, mask=col < width)
