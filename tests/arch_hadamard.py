"""Specialisations of the hadamard kernels that the model uses."""

from arch_case import ArchCase, tl


def _hadamard(name, dtype, width, rows, warps, acc="fp32"):
    language = tl()
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "scale": "fp64"}
    constants = dict(x_channel=1, out_channel=1, ROWS=rows, WIDTH=width, STAGES=width.bit_length() - 1)
    return ArchCase(
        f"hadamard {name}", "hadamard.triton", "_transform_kernel", types,
        constants | {"ACC": {"fp32": language.float32, "fp64": language.float64}[acc]}, num_warps=warps,
        any=frozenset({"rows", "size1", "size2", "scale"}),
    )  # fmt: skip


def _cases():
    yield _hadamard("128", "bf16", 128, rows=16, warps=1)
    yield _hadamard("4096", "fp16", 4096, rows=1, warps=2)
    yield _hadamard("fp64", "fp64", 4096, rows=1, warps=2, acc="fp64")
    yield _hadamard("one channel", "fp32", 1, rows=2048, warps=1)


CASES = tuple(_cases())
