"""RMSNorm in Triton: a row stays in registers, forward and backward read each input once."""

import torch
import triton
import triton.language as tl

from ..common.device import shared_memory, why_not_triton
from ..common.launch import prepare_launch
from ..common.rows import MAX_DIMS, merge_rows, pad_dims
from ..common.tiles import follow_previous_kernel, row_offset
from .configs import MAX_WIDTH, choose_backward_config, choose_config

REDUCTION_BYTES = 4096  # shared memory that sums over a row need beside the tiles in flight
REDUCED_COLUMNS = 64  # weight gradient columns that one program of the second pass adds up


def why_not(x, *others):
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of {x.shape[-1]} channels are wider than {MAX_WIDTH}"
    if x.numel() // max(1, x.shape[-1]) >= 2**31:
        return "there are 2^31 rows or more"
    if x.numel() and len(_merge(x, *others)[0]) > MAX_DIMS:
        return f"the leading dimensions (strides {x.stride()[:-1]}) don't merge into {MAX_DIMS}"
    return why_not_triton(x)


def prepare_forward(x, weight, out, eps, rounding):
    """A launch that writes the norm of x to `out`."""
    if x.numel() == 0:
        return lambda x, weight, out: None
    sizes, x_rows, out_rows = (pad_dims(dims, fill) for dims, fill in zip(_merge(x, out), (1, 0, 0)))
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    config = choose_config(width)
    return prepare_launch(
        _forward_kernel,
        triton.cdiv(rows, config.rows),
        (
            *(rows, sizes[1], sizes[2], width),
            *(*x_rows, x.stride(-1), *out_rows, out.stride(-1), 0 if weight is None else weight.stride(0)),
        ),
        dict(EPS=eps, ROUNDING=rounding, ACC=_acc(x), ROWS=config.rows, WIDTH=config.width, WIDE=_wide(x, weight, out)),
        x.device,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


def prepare_backward(x, weight, dout, dx, dweight, eps):
    """Launches that write dx and, over partial sums in a fixed order, dweight unless it has no elements."""
    if x.numel() == 0:
        return lambda x, weight, dout, dx, dweight: dweight.zero_()
    merged = _merge(x, dout, dx)
    sizes, *strides = (pad_dims(dims, fill) for dims, fill in zip(merged, (1, 0, 0, 0)))
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    config = choose_backward_config(width, x.element_size(), shared_memory(x.device) - REDUCTION_BYTES)
    tiles = triton.cdiv(rows, config.rows)
    weight_grad = dweight.numel() > 0
    programs = min(tiles, config.programs) if weight_grad else tiles
    row_strides = [step for dims, tensor in zip(strides, (x, dout, dx)) for step in (*dims, tensor.stride(-1))]
    main = prepare_launch(
        _backward_kernel,
        programs,
        (rows, sizes[1], sizes[2], width, tiles, *row_strides, 0 if weight is None else weight.stride(0)),
        # Tiles in flight take shared memory, which a program with one tile has no use for.
        dict(
            EPS=eps,
            ACC=_acc(x),
            ROWS=config.rows,
            WIDTH=config.width,
            STAGES=config.stages if programs < tiles else 1,
            WIDE=_wide(x, weight, dout, dx),
        ),
        x.device,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
    if not weight_grad:
        return lambda x, weight, dout, dx, dweight: main(x, weight, dout, dx, None)
    if programs == 1:
        return lambda x, weight, dout, dx, dweight: main(x, weight, dout, dx, dweight)
    reduce = prepare_launch(
        _reduce_kernel,
        triton.cdiv(width, REDUCED_COLUMNS),
        (programs, width),
        dict(ACC=_acc(x), ROWS=64, COLUMNS=REDUCED_COLUMNS),
        x.device,
        num_warps=4,
    )
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32

    def call(x, weight, dout, dx, dweight):
        # Each program owns fixed rows and the second pass has a fixed order: the same bits on every run.
        partial = torch.empty(programs, width, dtype=acc, device=x.device)
        main(x, weight, dout, dx, partial)
        reduce(partial, dweight)

    return call


def _merge(*tensors):
    return merge_rows(tensors[0].shape[:-1], *(tensor.stride()[:-1] for tensor in tensors))


def _wide(x, *others):
    """True if a channel's offset can pass 2^31, as in a channels-first tensor read by rows."""
    return x.shape[-1] * max(t.stride(-1) for t in (x, *others) if t is not None) >= 2**31


def _acc(x):
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _row_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of each row, in two steps: a thread's 64 channels in one chain would lose 3 bits of equal-sized terms."""
    STEP: tl.constexpr = 8 if WIDTH >= 64 else 1
    return tl.sum(tl.sum(tl.reshape(x, [ROWS, WIDTH // STEP, STEP]), 2), 1, keep_dims=True)


@triton.jit
def _scale(x, width, EPS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """rsqrt(mean(x^2) + eps) of each row, correctly rounded in fp32: the approximate rsqrt is off by up to 2 ulp."""
    mean_square = _row_sum(x * x, ROWS, WIDTH) / width + EPS
    if ACC == tl.float32:
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square))
    else:
        return 1.0 / tl.sqrt(mean_square)


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
    EPS: tl.constexpr,  # not an argument: those are fp32, and too coarse for fp64 rows
    ROUNDING: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    if WIDE:
        col = col.to(tl.int64)
    mask = (row < rows) & (col < width)
    follow_previous_kernel(PDL)
    x_row = x_ptr + row_offset(row, size1, size2, x_0, x_1, x_2)
    x = tl.load(x_row + col * x_channel, mask=mask, other=0.0)
    # In flight together with x: after the sum its latency would be added.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col * weight_channel, mask=col < width, other=0.0)
    x_acc = x.to(ACC)
    # scale = rsqrt(mean(x^2) + eps)
    scale = _scale(x_acc, width, EPS, ACC, ROWS, WIDTH)
    # rounding "scale": x * scale.to(x.dtype)
    if ROUNDING == "scale":
        scale = scale.to(x.dtype).to(ACC)
    normalized = x_acc * scale
    # rounding "normalized": weight * normalized.to(x.dtype)
    if ROUNDING == "normalized":
        normalized = normalized.to(x.dtype).to(ACC)
    if weight_ptr is not None:
        normalized = weight.to(ACC) * normalized
    out_row = out_ptr + row_offset(row, size1, size2, out_0, out_1, out_2)
    tl.store(out_row + col * out_channel, normalized.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "size1", "size2", "tiles"])
def _backward_kernel(
    x_ptr,  # [rows, D], rows in three dimensions
    weight_ptr,  # [D] or None
    dout_ptr,  # [rows, D]
    dx_ptr,  # [rows, D]
    partial_ptr,  # [programs, D], dweight itself for one program, or None without its gradient
    rows,
    size1,
    size2,
    width,  # D
    tiles,
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
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    follow_previous_kernel(PDL)
    program = tl.program_id(0)
    col = tl.arange(0, WIDTH)[None, :]
    if WIDE:
        col = col.to(tl.int64)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col * weight_channel, mask=col < width, other=0.0).to(ACC)
    if partial_ptr is not None:
        dweight = tl.zeros([ROWS, WIDTH], ACC)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (col < width)
        x_row = x_ptr + row_offset(row, size1, size2, x_0, x_1, x_2)
        dout_row = dout_ptr + row_offset(row, size1, size2, dout_0, dout_1, dout_2)
        x = tl.load(x_row + col * x_channel, mask=mask, other=0.0).to(ACC)
        dout = tl.load(dout_row + col * dout_channel, mask=mask, other=0.0).to(ACC)
        # Rows past the end are zeros: with eps 0 their scale is infinite and 0 * inf would reach dweight.
        scale = tl.where(row < rows, _scale(x, width, EPS, ACC, ROWS, WIDTH), 0.0)
        normalized = x * scale
        # dweight = sum over rows of dout * x * scale
        if partial_ptr is not None:
            dweight += dout * normalized
        if weight_ptr is not None:
            dout = dout * weight
        # dx = scale * (w dout - x scale^2 mean(w dout x))
        mean = _row_sum(dout * normalized, ROWS, WIDTH) / width
        dx = scale * (dout - normalized * mean)
        dx_row = dx_ptr + row_offset(row, size1, size2, dx_0, dx_1, dx_2)
        tl.store(dx_row + col * dx_channel, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        total = tl.sum(dweight, 0, keep_dims=True).to(partial_ptr.dtype.element_ty)
        tl.store(partial_ptr + program.to(tl.int64) * width + col, total, mask=col < width)


@triton.jit(do_not_specialize=["programs"])
def _reduce_kernel(
    partial_ptr,  # [programs, D]
    dweight_ptr,  # [D]
    programs,
    width,  # D
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    follow_previous_kernel(PDL)
    col = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for first in range(0, programs, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        total += tl.load(partial_ptr + row * width + col, mask=(row < programs) & (col < width), other=0.0)
    dweight = tl.sum(total, 0, keep_dims=True)
    tl.store(dweight_ptr + col, dweight.to(dweight_ptr.dtype.element_ty), mask=col < width)
