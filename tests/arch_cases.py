"""How each kernel is specialised in the model, for compiling without a GPU."""

import arch_compressor
import arch_hadamard
import arch_indexer
from arch_case import ArchCase, jit_functions, tl

__all__ = ["CASES", "jit_functions"]


def _rope(name, dtype, table, acc="fp32", **constants):
    language = tl()
    pointers = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "cos_ptr": f"*{table}", "sin_ptr": f"*{table}"}
    fixed = dict(x_channel=1, out_channel=1, cos_pair=1, sin_pair=1, INVERSE=False, WIDE=False)
    return ArchCase(
        f"rope {name}", "rope.triton", "_rope_kernel", pointers,
        fixed | {"ACC": {"fp32": language.float32, "fp64": language.float64}[acc]} | constants, any=frozenset({"heads", "tokens", "head_tiles", "token_tiles"}),
    )  # fmt: skip


def _norm(name, kernel, dtype, weight="fp32", acc="fp32", warps=4, **constants):
    language = tl()
    names = ("x_ptr", "out_ptr", "dout_ptr", "dx_ptr")
    types = {name: f"*{dtype}" for name in names} | {"partial_ptr": f"*{acc}", "weight_ptr": f"*{weight}"}
    fixed = dict(x_channel=1, out_channel=1, dout_channel=1, dx_channel=1, weight_channel=1, EPS=1e-6, WIDE=False)
    if weight is None:
        fixed |= dict(weight_ptr=None, partial_ptr=None, weight_channel=0)
    if kernel == "_forward_kernel":
        fixed |= dict(ROUNDING="once" if weight else "scale")
    if kernel == "_backward_kernel":
        fixed = dict(STAGES=4 if constants["WIDTH"] <= 512 else 1) | fixed  # as on a card with 64 KB of shared memory
    fixed |= constants
    return ArchCase(
        f"rms_norm {name}", "rms_norm.triton", kernel, types,
        fixed | {"ACC": {"fp32": language.float32, "fp64": language.float64}[acc]}, num_warps=warps,
        any=frozenset({"rows", "size1", "size2", "tiles", "programs"}),
    )  # fmt: skip


def _cases():
    yield _rope("bf16, fresh", "bf16", "bf16", TOKENS=1, HEADS=4, PAIRS=256)
    yield _rope("bf16, fp32 tables, in place", "bf16", "fp32", TOKENS=1, HEADS=32, PAIRS=32)
    yield _rope("fp64, inverse", "fp64", "fp64", "fp64", TOKENS=1, HEADS=1, PAIRS=256, INVERSE=True)
    # What rms_norm/configs.py chooses for rows of 512 and 7168 channels.
    for width, rows, warps, backward_rows, backward_warps in ((512, 4, 1, 2, 1), (8192, 1, 4, 1, 8)):
        yield _norm(f"{width} forward", "_forward_kernel", "bf16", warps=warps, ROWS=rows, WIDTH=width)
        yield _norm(f"{width} unweighted", "_forward_kernel", "bf16", None, warps=warps, ROWS=rows, WIDTH=width)
        backward = dict(warps=backward_warps, ROWS=backward_rows, WIDTH=width)
        yield _norm(f"{width} backward", "_backward_kernel", "bf16", **backward)
        yield _norm(f"{width} backward unweighted", "_backward_kernel", "fp32", None, **backward)
    yield _norm("channels far apart", "_forward_kernel", "bf16", ROWS=1, WIDTH=4096, WIDE=True)
    yield _norm("normalized", "_forward_kernel", "bf16", ROUNDING="normalized", ROWS=8, WIDTH=512)
    yield _norm("fp64", "_backward_kernel", "fp64", "fp64", "fp64", ROWS=2, WIDTH=512, STAGES=3)
    yield ArchCase(
        "rms_norm reduce", "rms_norm.triton", "_reduce_kernel", {"partial_ptr": "*fp32", "dweight_ptr": "*fp32"},
        dict(ACC=tl().float32, ROWS=64, COLUMNS=64), any=frozenset({"programs"}),
    )  # fmt: skip


CASES = (*_cases(), *arch_compressor.CASES, *arch_hadamard.CASES, *arch_indexer.CASES)
