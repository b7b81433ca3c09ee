"""Triton helpers that kernels of several ops share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow_previous_kernel(PDL: tl.constexpr):
    """Programmatic dependent launch: stands before a kernel's first access to memory.

    The kernel's programs are put on the multiprocessors while the previous kernel drains, wait here until its writes
    are visible, and let the next kernel do the same: a launch's latency, about 1 us, is hidden.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_offset(row, size1, size2, stride0, stride1, stride2):
    """Offset of each row, counted over three merged leading dimensions, innermost last. 64-bit before any product."""
    inner, middle, outer = row % size2, (row // size2) % size1, row // size2 // size1
    return outer.to(tl.int64) * stride0 + middle.to(tl.int64) * stride1 + inner.to(tl.int64) * stride2
