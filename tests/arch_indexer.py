"""Specialisations of the indexer kernels that the model uses."""

from arch_case import ArchCase, tl


def _topk(name, kernel, dtype, warps=16, **constants):
    types = {"scores_ptr": f"*{dtype}", "values_ptr": f"*{dtype}", "places_ptr": "*i32", "lengths_ptr": "*i32", "indices_ptr": "*i32"}
    constants["INFINITY"] = {"fp32": 0x7F800000, "bf16": 0x7F80, "fp16": 0x7C00}[dtype]
    return ArchCase(
        f"topk {name}", "indexer.triton", kernel, types, constants, num_warps=warps,
        any=frozenset({"size1", "size2", "columns", "chunks", "k", "scores_0", "scores_1", "scores_2"}),
    )  # fmt: skip


def _cases():
    tile = dict(PER_THREAD=32, THREADS=512)
    yield _topk("first pass", "_select_kernel", "fp32", places_ptr=None, GROUPS=512, **tile)
    yield _topk("first pass without lengths", "_select_kernel", "bf16", places_ptr=None, lengths_ptr=None, GROUPS=2048, **tile)
    yield _topk("second pass", "_select_kernel", "fp16", lengths_ptr=None, GROUPS=1024, **tile)
    yield _topk("short rows", "_select_kernel", "bf16", warps=1, places_ptr=None, PER_THREAD=2, THREADS=32, GROUPS=64)
    yield _topk("sort 512", "_sort_kernel", "fp32", warps=2, WIDTH=512, STAGES=9)
    yield _topk("sort 2048", "_sort_kernel", "bf16", warps=8, WIDTH=2048, STAGES=11)


CASES = tuple(_cases())
