"""Exact top-k in Triton: a chunk of a row stays in registers, where its k-th largest key is found by bisection.

A round of bisection costs two to three instructions a key. A radix histogram needs fewer rounds of more work: tl.histogram
takes a ballot for each bit of the bin and a count for each bin that a thread keeps, and shared-memory atomics beside.
"""

import torch
import triton
import triton.language as tl

from ..common.device import why_not_triton
from ..common.launch import prepare_launch
from ..common.rows import MAX_DIMS, merge_rows, pad_dims
from ..common.tiles import follow_previous_kernel, row_offset
from .configs import TILE, choose_select_configs, choose_sort_config

# The bits of +inf; those of NaN, without the sign, are larger.
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


def why_not(scores, values, lengths):
    if scores.shape[-1] >= 2**31 - TILE:
        return f"rows of {scores.shape[-1]} scores are too long for 32-bit indices"
    if len(_merge(scores, values, lengths)[0]) > MAX_DIMS:
        return f"the leading dimensions (strides {scores.stride()[:-1]}) don't merge into {MAX_DIMS}"
    return why_not_triton(scores)


def prepare_topk(scores, lengths, values, indices):
    """Launches that write the sorted k best of each row to `values` and `indices`."""
    columns, k, device = scores.shape[-1], values.shape[-1], scores.device
    if scores.numel() == 0 or k == 0:
        return lambda scores, lengths, values, indices: (values.fill_(float("-inf")), indices.fill_(-1))
    if scores.stride(-1) != 1 and columns > 1:
        compact = prepare_topk(scores.contiguous(), lengths, values, indices)
        return lambda scores, lengths, values, indices: compact(scores.contiguous(), lengths, values, indices)
    rows, infinity = scores.numel() // columns, INFINITY[scores.dtype]
    sizes, score_rows, out_rows, length_rows = (
        pad_dims(dims, fill) for dims, fill in zip(_merge(scores, values, lengths), (1, 0, 0, 0))
    )
    passes = []
    for config in choose_select_configs(columns, k):
        width = config.chunks * k
        # Between two passes: rows of `width` candidates, one after the other.
        between = [sizes[1] * sizes[2] * width, sizes[2] * width, width]
        out_steps = out_rows if config.chunks == 1 else between
        select = prepare_launch(
            _select_kernel,
            rows * config.chunks,
            (sizes[1], sizes[2], columns, config.chunks, k, *score_rows, *length_rows, *out_steps),
            dict(INFINITY=infinity, PER_THREAD=config.per_thread, THREADS=config.threads, GROUPS=config.groups),
            device,
            num_warps=config.num_warps,
        )
        passes.append((select, config.chunks))
        columns, score_rows, length_rows = width, between, [0, 0, 0]
    config = choose_sort_config(k)
    stages = config.width.bit_length() - 1
    sort = prepare_launch(
        *(_sort_kernel, rows, (k,), dict(INFINITY=infinity, WIDTH=config.width, STAGES=stages), device), num_warps=config.num_warps
    )

    def call(scores, lengths, values, indices):
        source, places = scores, None
        for select, chunks in passes:
            if chunks == 1:
                best, best_places = values, indices
            else:
                best = torch.empty(rows * chunks * k, dtype=scores.dtype, device=device)
                best_places = torch.empty(rows * chunks * k, dtype=torch.int32, device=device)
            select(source, places, lengths, best, best_places)
            source, places, lengths = best, best_places, None
        sort(values, indices)

    return call


def _merge(scores, values, lengths):
    no_lengths = (0,) * (scores.dim() - 1)
    return merge_rows(
        *(scores.shape[:-1], scores.stride()[:-1], values.stride()[:-1]), no_lengths if lengths is None else lengths.stride()
    )


@triton.jit
def _to_key(x, INFINITY: tl.constexpr):
    """int32 in the order of the floats x: both zeros are 0, and all NaN stand right below -inf."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    bits = x.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(tl.int32)
    # Sign and size to two's complement. NaN with a sign is below -inf then, NaN without one above inf.
    key = tl.where(bits < 0, LOWEST - bits, bits)
    return tl.where(key > INFINITY, -INFINITY - 1, tl.maximum(key, -INFINITY - 1))


@triton.jit
def _from_key(key, FLOAT: tl.constexpr, INFINITY: tl.constexpr):
    """The float of a key; -inf for what is not there."""
    BITS: tl.constexpr = FLOAT.primitive_bitwidth
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    key = tl.where(key == LOWEST, -INFINITY, key)
    return _bitcast(tl.where(key < 0, LOWEST - key, key), FLOAT)


@triton.jit
def _bitcast(key, FLOAT: tl.constexpr):
    """Kernels hand each other keys in the memory of floats of their size."""
    return key.to(tl.int16 if FLOAT.primitive_bitwidth == 16 else tl.int32).to(FLOAT, bitcast=True)


@triton.jit
def _count(mask):
    """How many of [PER_THREAD, THREADS]: each thread its own, then all threads."""
    return tl.sum(tl.sum(mask.to(tl.int32), 0), 0)


@triton.jit
def _threshold(key, k, GROUPS: tl.constexpr):
    """A bound and how many keys reach it: exactly k, or more where the k-th and the next are equal to the bound."""
    # Each of at least k groups has a key that reaches the smallest of the groups' largest ones.
    THREADS: tl.constexpr = key.shape[1]
    largest = tl.max(tl.reshape(key, [GROUPS // THREADS, key.numel // GROUPS, THREADS]), 1)
    low, high = tl.min(tl.min(largest, 0), 0), tl.max(tl.max(largest, 0), 0) + 1
    # At least k keys reach `low`, fewer reach `high`. Right above `low` first: rows of equal scores and rows with fewer
    # than k of them end there.
    middle, reached = low + 1, k + 1
    while low + 1 < high:
        count = _count(key >= middle)
        if count < k:
            high = middle
        else:
            low, reached = middle, count
            if count == k:
                high = middle + 1
        middle = (low & high) + ((low ^ high) >> 1)
    return low, reached


@triton.jit
def _place_bound(place, equal, wanted, low, high):
    """The bound from `low` to `high` below which `wanted` of the places in `equal` lie."""
    while low < high:
        middle = low + (high - low) // 2
        count = _count(equal & (place < middle))
        if count < wanted:
            low = middle + 1
        else:
            high = middle
            if count == wanted:
                low = middle
    return low


# Nothing is told of the rows' alignment: with loads of several entries a thread the stores would need another layout.
_UNTOLD = ["size1", "size2", "columns", "chunks", "k", "scores_0", "scores_1", "scores_2"]


@triton.jit(do_not_specialize=_UNTOLD)
def _select_kernel(
    scores_ptr,  # [rows, N], rows in three dimensions
    places_ptr,  # [rows, N], each score's index in the original row, -1 for none; or None: N is that row
    lengths_ptr,  # [rows] or None
    values_ptr,  # [rows, chunks, k]
    indices_ptr,  # [rows, chunks, k]
    size1,
    size2,
    columns,  # N
    chunks,
    k,
    scores_0,
    scores_1,
    scores_2,
    lengths_0,
    lengths_1,
    lengths_2,
    out_0,
    out_1,
    out_2,
    INFINITY: tl.constexpr,
    PER_THREAD: tl.constexpr,
    THREADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program writes the k best keys of its chunk and their places, in a fixed order of no meaning."""
    FLOAT: tl.constexpr = values_ptr.dtype.element_ty
    LOWEST: tl.constexpr = -(1 << (FLOAT.primitive_bitwidth - 1))
    WIDTH: tl.constexpr = PER_THREAD * THREADS
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    first = chunk * WIDTH
    place = first + (tl.arange(0, PER_THREAD) * THREADS)[:, None] + tl.arange(0, THREADS)[None, :]
    follow_previous_kernel(PDL)
    # hidden = column >= lengths
    visible = columns
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row_offset(row, size1, size2, lengths_0, lengths_1, lengths_2))
        visible = tl.minimum(tl.maximum(length, 0), columns).to(tl.int32)
    offset = row_offset(row, size1, size2, scores_0, scores_1, scores_2)
    there = place < visible
    scores = tl.load(scores_ptr + offset + place, mask=there, other=0.0)
    last = first + WIDTH
    if places_ptr is None:
        key = tl.where(there, _to_key(scores, INFINITY), LOWEST)
    else:
        key = tl.where(there, scores.to(tl.int16 if LOWEST == -32768 else tl.int32, bitcast=True).to(tl.int32), LOWEST)
        place = tl.load(places_ptr + offset + place, mask=there, other=-1)
        first, last = first * 0, first * 0 + 0x7FFFFFFF
    bound, reached = _threshold(key, k, GROUPS)
    # All keys above the bound, and of its equals those of the lowest places. What is not there is never chosen.
    if bound == LOWEST:
        last = first * 0 - 1
    elif reached > k:
        above = _count(key > bound)
        last = _place_bound(place, key == bound, k - above, first, last)
    chosen = (key > bound) | ((key == bound) & (place < last))
    # Slots of the chosen: each thread's one after the other. The sort makes their order anew.
    ones = chosen.to(tl.int32)
    in_thread = tl.sum(ones, 0)
    slot = (tl.cumsum(in_thread, 0) - in_thread - 1)[None, :] + tl.cumsum(ones, 0)
    # Not so, and of no effect on what is stored; it keeps the order of the tile's dimensions, and with it the layout.
    slot = tl.max_contiguous(slot, [1, 2])
    out = row_offset(row, size1, size2, out_0, out_1, out_2) + chunk.to(tl.int64) * k
    tl.store(values_ptr + out + slot, _bitcast(key, FLOAT), mask=chosen)
    tl.store(indices_ptr + out + slot, place, mask=chosen)
    # values.masked_fill(none, -inf), indices.masked_fill(none, -1)
    slot = tl.arange(0, GROUPS)
    empty = (slot >= tl.sum(in_thread, 0)) & (slot < k)
    tl.store(values_ptr + out + slot, _bitcast(tl.full([GROUPS], LOWEST, tl.int32), FLOAT), mask=empty)
    tl.store(indices_ptr + out + slot, tl.full([GROUPS], -1, tl.int32), mask=empty)


@triton.jit
def _exchange(x, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Put entries HALF apart in order: ascending in each first block of BLOCK entries, descending in each second."""
    PAIRS: tl.constexpr = x.numel // (2 * HALF)
    pair = tl.reshape(x, [PAIRS, 2, HALF])
    # The other one of a pair, as integers that wrap around: exact, one shuffle, and quick in the interpreter.
    other = tl.sum(pair, 1, keep_dims=True) - pair
    is_right = (tl.arange(0, 2) == 1)[None, :, None]
    is_descending = (tl.arange(0, PAIRS) * (2 * HALF) & BLOCK != 0)[:, None, None]
    keep_larger = is_right != is_descending
    return tl.reshape(tl.where((pair < other) != keep_larger, pair, other), x.shape)


@triton.jit(do_not_specialize=["k"])
def _sort_kernel(
    values_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    k,
    INFINITY: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,  # log2(WIDTH)
    PDL: tl.constexpr,
):
    """Sort each row in place: every entry passes through the network before any is written."""
    slot = tl.arange(0, WIDTH)
    follow_previous_kernel(PDL)
    offset = tl.program_id(0).to(tl.int64) * k + slot
    FLOAT: tl.constexpr = values_ptr.dtype.element_ty
    bits = tl.load(values_ptr + offset, mask=slot < k, other=0.0).to(
        tl.int16 if FLOAT.primitive_bitwidth == 16 else tl.int32, bitcast=True
    )
    key = tl.where(slot < k, bits.to(tl.int32), -(1 << (FLOAT.primitive_bitwidth - 1)))
    index = tl.load(indices_ptr + offset, mask=slot < k, other=-1)
    # Larger keys first, equal ones by index: one number, ascending.
    order = (~key).to(tl.int64) << 32 | (index.to(tl.int64) & 0xFFFFFFFF)
    for stage in tl.static_range(1, STAGES + 1):
        for step in tl.static_range(stage):
            order = _exchange(order, 1 << stage, 1 << (stage - 1 - step))
    key = ~(order >> 32).to(tl.int32)
    tl.store(values_ptr + offset, _from_key(key, FLOAT, INFINITY), mask=slot < k)
    tl.store(indices_ptr + offset, order.to(tl.int32), mask=slot < k)
