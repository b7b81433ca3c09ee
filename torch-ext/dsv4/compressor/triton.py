"""Gated pooling, RMSNorm and rope in Triton: each element of kv and gate is read once, forward and backward.

A program holds all slots of a window for a block of channels: the softmax needs no second pass, and the bias stays in
registers from window to window. Where a block is the whole entry (CSA) it norms and rotates it too, else (HCA: 128 slots
of 64 channels) a second kernel does, which reads one row for each window.
"""

import torch
import triton
import triton.language as tl

from ..common.device import shared_memory, why_not_triton
from ..common.launch import prepare_launch
from ..common.tiles import follow_previous_kernel
from .configs import MAX_SLOTS, MAX_WIDTH, choose_norm_config, choose_pool_config

SCRATCH_BYTES = 16384  # shared memory that sums over slots and changes of layout need beside the windows in flight
REDUCED_COLUMNS = 64  # columns of a gradient that one program of the second pass adds up


def why_not(kv, norm_weight, rate, overlap):
    if norm_weight.shape[0] > MAX_WIDTH:
        return f"entries of {norm_weight.shape[0]} channels are wider than {MAX_WIDTH}"
    if rate * (1 + overlap) > MAX_SLOTS:
        return f"windows of {rate * (1 + overlap)} slots are longer than {MAX_SLOTS}"
    return why_not_triton(kv)


def prepare_forward(tensors, entries, pooled, rate, overlap, eps, numerics):
    """Launches that write the entries and, where `pooled` is given, the sums before the norm."""
    if entries.numel() == 0:
        return lambda tensors, entries, pooled: None
    pool, rounds = _Pool(tensors, rate, overlap, numerics, backward=False), numerics == "transformers"
    main = pool.launch(_pool_kernel, pool.table, dict(EPS=eps, ROUND=rounds, FUSED=pool.blocks == 1))
    if pool.blocks == 1:
        return lambda tensors, entries, pooled: main(*_contiguous(tensors), None, pooled, entries)
    config, acc = choose_norm_config(pool.width), torch.float64 if entries.dtype == torch.float64 else torch.float32
    tiles, scalars = triton.cdiv(pool.rows, config.rows), (pool.rows, pool.windows, pool.width, *pool.table)
    constants = dict(EPS=eps, ROWS=config.rows, WIDTH=config.width)
    norm = _launch(_norm_rope_kernel, tiles, config.num_warps, entries, scalars, constants)

    def call(tensors, entries, pooled):
        tensors = _contiguous(tensors)
        seen = torch.empty_like(entries, dtype=entries.dtype if rounds else acc)
        main(*tensors, seen, pooled, None)
        norm(seen, *tensors[3:6], entries)

    return call


def prepare_backward(dout, tensors, pooled, grads, rate, overlap, eps, numerics):
    """Launches that write the gradients; over partial sums in a fixed order those of position_bias and norm_weight."""
    if pooled.numel() == 0:
        return lambda dout, tensors, pooled, grads: [grad.zero_() for grad in grads]
    pool = _Pool(tensors, rate, overlap, numerics, backward=True)
    config = choose_norm_config(pool.width)
    tiles = triton.cdiv(pool.rows, config.rows)
    programs = min(tiles, config.programs)
    scalars = (pool.rows, pool.windows, pool.width, tiles, *_contiguous([dout])[0].stride()[:2], *pool.table)
    constants = dict(EPS=eps, ROWS=config.rows, WIDTH=config.width)
    norm = _launch(_norm_rope_backward_kernel, programs, config.num_warps, pooled, scalars, constants)
    main = pool.launch(_pool_backward_kernel, (), {})
    reduce_bias, reduce_weight = map(_prepare_reduce, (pool.groups, programs), grads[2:4], (pooled, pooled))

    def call(dout, tensors, pooled, grads):
        kv, gate, position_bias, norm_weight, cos, sin, *previous = _contiguous(tensors)
        dkv, dgate, dposition_bias, dnorm_weight, *dprevious = grads
        if previous[0] is None:
            dprevious = (None, None)
        dpooled = torch.empty_like(pooled)
        # Each program owns fixed windows and the second pass has a fixed order: the same bits on every run.
        weights, biases = _partial(programs, dnorm_weight, pooled), _partial(pool.groups, dposition_bias, pooled)
        norm(*_contiguous([dout]), pooled, norm_weight, cos, sin, dpooled, weights)
        main(kv, gate, position_bias, *previous, dpooled, dkv, dgate, *dprevious, biases)
        reduce_weight(weights, dnorm_weight)
        reduce_bias(biases, dposition_bias)

    return call


def _partial(programs, grad, pooled):
    """Where each program writes its part of a parameter's gradient; None if nobody wants that, which has no elements then."""
    return None if grad.numel() == 0 else grad if programs == 1 else pooled.new_empty(programs, grad.numel())


class _Pool:
    """What both kernels that walk the windows are launched with: `groups` of windows times `blocks` of channels."""

    def __init__(self, tensors, rate, overlap, numerics, backward):
        kv, gate, position_bias, norm_weight, cos, _, *previous = _contiguous(tensors)
        self.kv, self.width, self.windows = kv, norm_weight.shape[0], kv.shape[1] // rate
        self.rows, slots = kv.shape[0] * self.windows, rate * (1 + overlap)
        slot_bytes = sum(x.element_size() for x in (kv, gate, *previous) if x is not None)
        room = shared_memory(kv.device) - SCRATCH_BYTES
        self.config = config = choose_pool_config(self.rows, slots, self.width, slot_bytes, room, backward)
        self.blocks, self.groups = config.blocks, config.groups
        # The logit is of the wider dtype of both, so it is rounded to kv's where the bias has that one too.
        round_logits = numerics == "transformers" and position_bias.dtype == gate.dtype
        self.constants = dict(RATE=rate, OVERLAP=overlap, ROUND_LOGITS=round_logits)
        self.constants |= dict(SLOTS=config.slots, CHANNELS=config.channels, STAGES=config.stages)
        strides = (*kv.stride()[:2], *gate.stride()[:2])
        self.scalars = (self.rows, self.windows, self.width, self.groups, self.blocks, *strides)
        # Pairs of the tables and their batch stride, 0 where they are broadcast.
        self.table = cos.shape[2], 0 if cos.shape[0] == 1 else self.windows * cos.shape[2]

    def launch(self, kernel, scalars, constants):
        programs, num_warps = self.groups * self.blocks, self.config.num_warps
        return _launch(kernel, programs, num_warps, self.kv, (*self.scalars, *scalars), self.constants | constants)


def _launch(kernel, programs, num_warps, like, scalars, constants):
    constants = constants | dict(ACC=tl.float64 if like.dtype == torch.float64 else tl.float32)
    return prepare_launch(kernel, programs, scalars, constants, like.device, num_warps=num_warps, enable_fp_fusion=False)


def _prepare_reduce(programs, grad, like):
    """A launch that adds up the programs' parts of a gradient, which one program or none has written in full."""
    if programs == 1 or grad.numel() == 0:
        return lambda partial, grad: None
    tiles, constants = triton.cdiv(grad.numel(), REDUCED_COLUMNS), dict(ROWS=64, COLUMNS=REDUCED_COLUMNS)
    return _launch(_reduce_kernel, tiles, 4, like, (programs, grad.numel()), constants)


def _contiguous(tensors):
    """The first two with adjacent channels and rows of any stride, as they mostly are; the small others contiguous."""
    large = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:2])
    return *large, *(None if x is None else x.contiguous() for x in tensors[2:])


@triton.jit
def _window_slots(block, width, RATE: tl.constexpr, OVERLAP: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr):
    """A window's slots and entry columns, and of each: whether it is one, its channel in kv and gate, its row in the bias,
    its token counted from the window's first one."""
    slot, col = tl.arange(0, SLOTS)[:, None], (block * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (slot < RATE * (1 + OVERLAP)) & (col < width)
    if OVERLAP:
        # The previous window's tokens in the first series, then the window's own in the second.
        return slot, col, inside, col + (slot >= RATE).to(tl.int32) * width, slot % RATE, slot - RATE
    else:
        return slot, col, inside, col, slot, slot


@triton.jit
def _reciprocal(x, ACC: tl.constexpr):
    return tl.div_rn(1.0, x) if ACC == tl.float32 else 1.0 / x


@triton.jit
def _load_window(
    kv_rows, gate_rows, previous_kv, previous_gate, bias, batch, first_token, first, slot, channel, col, inside,
    kv_batch, kv_token, gate_batch, gate_token, width,
    RATE: tl.constexpr, ROUND_LOGITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """kv and softmax weights of a window's slots, and which of them are this call's tokens."""
    # 64-bit before any product.
    token = (first_token + first).to(tl.int64)
    exists = inside & (token >= 0)
    kv = tl.load(kv_rows + batch * kv_batch + token * kv_token + channel, mask=exists, other=0.0)
    gate = tl.load(gate_rows + batch * gate_batch + token * gate_token + channel, mask=exists, other=0.0)
    # logits = gate + position_bias
    logits = tl.where(exists, gate.to(ACC) + bias, float("-inf"))
    # before = previous.to(x.dtype): its gate holds the bias already
    if previous_kv is not None:
        held, offset = inside & (token < 0), (batch * RATE + slot) * width + col
        before_kv = tl.load(previous_kv + offset, mask=held, other=0.0)
        before_gate = tl.load(previous_gate + offset, mask=held, other=0.0)
        kv = tl.where(held, before_kv.to(kv.dtype), kv)
        logits = tl.where(held, before_gate.to(ACC), logits)
    if ROUND_LOGITS:
        logits = logits.to(gate.dtype).to(ACC)
    # kv.masked_fill(logits == -inf, 0)
    kv = tl.where(logits == float("-inf"), 0.0, kv.to(ACC))
    # weights = logits.softmax
    weights = tl.exp(logits - tl.max(logits, 0, keep_dims=True))
    return kv, weights * _reciprocal(tl.sum(weights, 0, keep_dims=True), ACC), exists


@triton.jit
def _row_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of each row, in two steps: a thread's channels in one chain would lose bits of equal-sized terms."""
    STEP: tl.constexpr = 8 if WIDTH >= 64 else 1
    return tl.sum(tl.sum(tl.reshape(x, [ROWS, WIDTH // STEP, STEP]), 2), 1, keep_dims=True)


@triton.jit
def _scale(pooled, width, EPS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """rsqrt(mean(x^2) + eps) of each row, correctly rounded in fp32: the approximate rsqrt is off by up to 2 ulp."""
    mean_square = _row_sum(pooled * pooled, ROWS, WIDTH) / width + EPS
    return _reciprocal(tl.sqrt_rn(mean_square) if ACC == tl.float32 else tl.sqrt(mean_square), ACC)


@triton.jit
def _load_turn(cos_table, sin_table, row, rows, windows, pair, pairs, table_batch, ACC: tl.constexpr):
    """cos and sin of each row's pairs, [ROWS, WIDTH / 2]."""
    batch, window = (row // windows).to(tl.int64), (row % windows).to(tl.int64)
    offset, mask = batch * table_batch + window * pairs + pair, (row < rows) & (pair >= 0) & (pair < pairs)
    cos = tl.load(cos_table + offset, mask=mask, other=0.0).to(ACC)
    return cos, tl.load(sin_table + offset, mask=mask, other=0.0).to(ACC)


@triton.jit
def _rotate(x, cos, sin, pair, pairs, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """rotated = (even * cos - odd * sin, odd * cos + even * sin); channels that are not rotary pass bit for bit."""
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    rotary = (pair >= 0) & (pair < pairs)
    new_even = tl.where(rotary, even * cos - odd * sin, even)
    new_odd = tl.where(rotary, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), [ROWS, WIDTH])


@triton.jit
def _norm_rope(
    pooled, row, rows, windows, width, weight, cos_table, sin_table, pairs, table_batch, EPS: tl.constexpr,
    ROUNDED: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The entries of pooled rows, [ROWS, WIDTH] in ACC."""
    # normed = (norm_weight * (pooled * scale)).to(rounded)
    normed = (weight * (pooled * _scale(pooled, width, EPS, ACC, ROWS, WIDTH))).to(ROUNDED).to(ACC)
    # rope(normed)
    pair = tl.arange(0, WIDTH // 2)[None, :] - (width // 2 - pairs)
    cos, sin = _load_turn(cos_table, sin_table, row, rows, windows, pair, pairs, table_batch, ACC)
    return _rotate(normed, cos, sin, pair, pairs, ROWS, WIDTH)


@triton.jit(do_not_specialize=["rows", "windows", "groups", "blocks"])
def _pool_kernel(
    kv_ptr, gate_ptr,  # [B, W * RATE, D or 2 D]
    bias_ptr,  # [RATE, D or 2 D], contiguous as all below
    weight_ptr,  # [D]
    cos_ptr, sin_ptr,  # [B or 1, W, P]
    previous_kv_ptr, previous_gate_ptr,  # [B, RATE, D] or None
    seen_ptr,  # [B, W, D]: what the norm sees; None if FUSED
    pooled_ptr,  # [B, W, D]: the sums without any rounding, or None
    entries_ptr,  # [B, W, D], or None unless FUSED
    rows, windows, width, groups, blocks,  # B * W, W, D
    kv_batch, kv_token, gate_batch, gate_token, pairs, table_batch,
    RATE: tl.constexpr, OVERLAP: tl.constexpr, ROUND_LOGITS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, FUSED: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow_previous_kernel(PDL)
    rounded: tl.constexpr = kv_ptr.dtype.element_ty if ROUND else ACC
    block = tl.program_id(0) % blocks
    slot, col, inside, channel, bias_row, first = _window_slots(block, width, RATE, OVERLAP, SLOTS, CHANNELS)
    bias = tl.load(bias_ptr + bias_row * (width * (1 + OVERLAP)) + channel, mask=inside, other=0.0).to(ACC)
    if FUSED:
        weight = tl.load(weight_ptr + col, mask=col < width, other=0.0).to(ACC)
    for row in tl.range(tl.program_id(0) // blocks, rows, groups, num_stages=STAGES):
        batch, window = (row // windows).to(tl.int64), row % windows
        kv, weights, _ = _load_window(
            kv_ptr, gate_ptr, previous_kv_ptr, previous_gate_ptr, bias, batch, window * RATE, first, slot, channel, col,
            inside, kv_batch, kv_token, gate_batch, gate_token, width, RATE, ROUND_LOGITS, ACC,
        )  # fmt: skip
        offset = (batch * windows + window) * width + col
        if pooled_ptr is not None:
            tl.store(pooled_ptr + offset, tl.sum(kv * weights, 0, keep_dims=True), mask=col < width)
        # pooled = (kv.to(rounded) * weights.to(rounded)).sum(2)
        products = (kv * weights.to(rounded).to(ACC)).to(rounded).to(ACC)
        pooled = tl.sum(products, 0, keep_dims=True).to(rounded).to(ACC)
        if seen_ptr is not None:
            tl.store(seen_ptr + offset, pooled.to(seen_ptr.dtype.element_ty), mask=col < width)
        if FUSED:
            # Columns past the end have no slot, so their softmax is NaN, which must not reach the norm's sum.
            entries = _norm_rope(
                tl.where(col < width, pooled, 0.0), row, rows, windows, width, weight, cos_ptr, sin_ptr, pairs, table_batch,
                EPS, rounded, ACC, 1, CHANNELS,
            )  # fmt: skip
            tl.store(entries_ptr + offset, entries.to(entries_ptr.dtype.element_ty), mask=col < width)


@triton.jit(do_not_specialize=["rows", "windows"])
def _norm_rope_kernel(
    pooled_ptr,  # [B, W, D], contiguous, rounded as the numerics say
    weight_ptr,  # [D]
    cos_ptr, sin_ptr,  # [B or 1, W, P]
    entries_ptr,  # [B, W, D], contiguous
    rows, windows, width, pairs, table_batch,  # B * W, W, D, P
    EPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow_previous_kernel(PDL)
    rounded: tl.constexpr = pooled_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    mask, offset = (row < rows) & (col < width), row.to(tl.int64) * width + col
    pooled = tl.load(pooled_ptr + offset, mask=mask, other=0.0).to(ACC)
    weight = tl.load(weight_ptr + col, mask=col < width, other=0.0).to(ACC)
    entries = _norm_rope(
        pooled, row, rows, windows, width, weight, cos_ptr, sin_ptr, pairs, table_batch, EPS, rounded, ACC, ROWS, WIDTH,
    )  # fmt: skip
    tl.store(entries_ptr + offset, entries.to(entries_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "windows", "tiles"])
def _norm_rope_backward_kernel(
    dout_ptr,  # [B, W, D]
    pooled_ptr,  # [B, W, D], contiguous
    weight_ptr,  # [D]
    cos_ptr, sin_ptr,  # [B or 1, W, P]
    dpooled_ptr,  # [B, W, D], contiguous
    partial_ptr,  # [programs, D], dnorm_weight itself for one program, or None without its gradient
    rows, windows, width, tiles, dout_batch, dout_window, pairs, table_batch,  # B * W, W, D
    EPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow_previous_kernel(PDL)
    program = tl.program_id(0)
    col = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, WIDTH // 2)[None, :] - (width // 2 - pairs)
    weight = tl.load(weight_ptr + col, mask=col < width, other=0.0).to(ACC)
    if partial_ptr is not None:
        dweight = tl.zeros([ROWS, WIDTH], ACC)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        mask, offset = (row < rows) & (col < width), row.to(tl.int64) * width + col
        batch, window = (row // windows).to(tl.int64), (row % windows).to(tl.int64)
        pooled = tl.load(pooled_ptr + offset, mask=mask, other=0.0).to(ACC)
        dout = tl.load(dout_ptr + batch * dout_batch + window * dout_window + col, mask=mask, other=0.0).to(ACC)
        # dnormed = rope(dout, cos, -sin)
        cos, sin = _load_turn(cos_ptr, sin_ptr, row, rows, windows, pair, pairs, table_batch, ACC)
        dnormed = _rotate(dout, cos, -sin, pair, pairs, ROWS, WIDTH)
        # Rows past the end are zeros: with eps 0 their scale is infinite and 0 * inf would reach dweight.
        scale = tl.where(row < rows, _scale(pooled, width, EPS, ACC, ROWS, WIDTH), 0.0)
        normalized = pooled * scale
        # dnorm_weight = sum of dnormed * normalized
        if partial_ptr is not None:
            dweight += dnormed * normalized
        # dpooled = scale * (weighted - normalized * mean(weighted * normalized))
        weighted = dnormed * weight
        mean = _row_sum(weighted * normalized, ROWS, WIDTH) / width
        tl.store(dpooled_ptr + offset, scale * (weighted - normalized * mean), mask=mask)
    if partial_ptr is not None:
        total = tl.sum(dweight, 0, keep_dims=True).to(partial_ptr.dtype.element_ty)
        tl.store(partial_ptr + program.to(tl.int64) * width + col, total, mask=col < width)


@triton.jit(do_not_specialize=["rows", "windows", "groups", "blocks"])
def _pool_backward_kernel(
    kv_ptr, gate_ptr,  # [B, W * RATE, D or 2 D]
    bias_ptr,  # [RATE, D or 2 D], contiguous as all below
    previous_kv_ptr, previous_gate_ptr,  # [B, RATE, D] or None
    dpooled_ptr,  # [B, W, D]
    dkv_ptr, dgate_ptr,  # as kv
    dprevious_kv_ptr, dprevious_gate_ptr,  # [B, RATE, D] or None
    partial_ptr,  # [groups, RATE, D or 2 D], dposition_bias itself for one group, or None without its gradient
    rows, windows, width, groups, blocks,  # B * W, W, D
    kv_batch, kv_token, gate_batch, gate_token,
    RATE: tl.constexpr, OVERLAP: tl.constexpr, ROUND_LOGITS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow_previous_kernel(PDL)
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    slot, col, inside, channel, bias_row, first = _window_slots(block, width, RATE, OVERLAP, SLOTS, CHANNELS)
    bias = tl.load(bias_ptr + bias_row * (width * (1 + OVERLAP)) + channel, mask=inside, other=0.0).to(ACC)
    if partial_ptr is not None:
        dbias = tl.zeros([SLOTS, CHANNELS], ACC)
    for row in tl.range(group, rows, groups, num_stages=STAGES):
        batch, window = (row // windows).to(tl.int64), row % windows
        kv, weights, exists = _load_window(
            kv_ptr, gate_ptr, previous_kv_ptr, previous_gate_ptr, bias, batch, window * RATE, first, slot, channel, col,
            inside, kv_batch, kv_token, gate_batch, gate_token, width, RATE, ROUND_LOGITS, ACC,
        )  # fmt: skip
        dpooled = tl.load(dpooled_ptr + (batch * windows + window) * width + col, mask=col < width, other=0.0)
        # dkv = weights * dpooled; dlogits = dkv * (kv - (weights * kv).sum)
        dkv = weights * dpooled
        dlogits = dkv * (kv - tl.sum(weights * kv, 0, keep_dims=True))
        # dposition_bias = dgate.sum: the previous window's slots are not among this call's gates
        if partial_ptr is not None:
            dbias += tl.where(exists, dlogits, 0.0)
        token_row = ((batch * windows + window) * RATE + first) * (width * (1 + OVERLAP))
        tl.store(dkv_ptr + token_row + channel, dkv.to(dtype), mask=exists)
        tl.store(dgate_ptr + token_row + channel, dlogits.to(dtype), mask=exists)
        if dprevious_kv_ptr is not None:
            held, offset = inside & ~exists, (batch * RATE + slot) * width + col
            tl.store(dprevious_kv_ptr + offset, dkv.to(dprevious_kv_ptr.dtype.element_ty), mask=held)
            tl.store(dprevious_gate_ptr + offset, dlogits.to(dprevious_gate_ptr.dtype.element_ty), mask=held)
        if OVERLAP:
            # The last window's first series has no reader in this call.
            unread = inside & (slot >= RATE) & (window == windows - 1)
            zeros = tl.zeros([SLOTS, CHANNELS], dtype)
            tl.store(dkv_ptr + token_row + col, zeros, mask=unread)
            tl.store(dgate_ptr + token_row + col, zeros, mask=unread)
    if partial_ptr is not None:
        partial = partial_ptr + (group.to(tl.int64) * RATE + bias_row) * (width * (1 + OVERLAP)) + channel
        tl.store(partial, dbias.to(partial_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def _reduce_kernel(
    partial_ptr,  # [programs, width]
    total_ptr,  # [width]
    programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow_previous_kernel(PDL)
    col = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for first in range(0, programs, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        mask = (row < programs) & (col < width)
        total += tl.load(partial_ptr + row.to(tl.int64) * width + col, mask=mask, other=0.0)
    total = tl.sum(total, 0, keep_dims=True)
    tl.store(total_ptr + col, total.to(total_ptr.dtype.element_ty), mask=col < width)
