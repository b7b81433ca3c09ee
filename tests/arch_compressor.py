"""Specialisations of the compressor kernels that the model uses."""

from arch_case import ArchCase, tl


def _compressor(name, kernel, dtype="bf16", previous=False, acc="fp32", warps=4, **constants):
    language = tl()
    names = ("kv", "gate", "previous_kv", "dkv", "dgate", "dprevious_kv", "dout", "cos", "sin", "entries", "seen")
    wide = ("bias", "weight", "previous_gate", "dprevious_gate", "pooled", "dpooled", "partial", "total")
    types = {f"{name}_ptr": f"*{dtype}" for name in names} | {f"{name}_ptr": f"*{acc}" for name in wide}
    fixed = dict(EPS=1e-6, ACC={"fp32": language.float32, "fp64": language.float64}[acc])
    if not previous:
        fixed |= dict.fromkeys([f"{grad}previous_{name}_ptr" for grad in ("", "d") for name in ("kv", "gate")])
    return ArchCase(
        f"compressor {name}", "compressor.triton", kernel, types, fixed | constants, num_warps=warps,
        any=frozenset({"rows", "windows", "groups", "blocks", "tiles", "programs", "table_batch"}),
    )  # fmt: skip


def _compressor_cases():
    csa = dict(RATE=4, OVERLAP=True, ROUND_LOGITS=False, SLOTS=8, CHANNELS=512)
    hca = dict(RATE=128, OVERLAP=False, ROUND_LOGITS=False, SLOTS=128, CHANNELS=64)
    fused, split = dict(ROUND=True, FUSED=True, seen_ptr=None), dict(ROUND=True, FUSED=False, entries_ptr=None)
    yield _compressor("csa", "_pool_kernel", STAGES=3, pooled_ptr=None, **csa, **fused)
    yield _compressor("csa, later chunk, training", "_pool_kernel", previous=True, STAGES=2, **csa, **fused)
    yield _compressor("hca", "_pool_kernel", warps=8, STAGES=2, **hca, **split)
    yield _compressor("hca fp64", "_pool_kernel", "fp64", acc="fp64", warps=8, STAGES=1, **hca, **split)
    yield _compressor("norm", "_norm_rope_kernel", warps=1, ROWS=2, WIDTH=512)
    yield _compressor("norm backward", "_norm_rope_backward_kernel", warps=1, ROWS=2, WIDTH=512)
    yield _compressor("csa backward, later chunk", "_pool_backward_kernel", previous=True, warps=8, STAGES=1, **csa)
    yield _compressor("csa backward", "_pool_backward_kernel", warps=8, STAGES=3, **csa)
    yield _compressor("hca backward", "_pool_backward_kernel", warps=16, STAGES=2, **hca)
    yield _compressor("hca backward fp64", "_pool_backward_kernel", "fp64", acc="fp64", warps=16, STAGES=1, **hca)
    yield _compressor("reduce", "_reduce_kernel", ROWS=64, COLUMNS=64)


CASES = tuple(_compressor_cases())
