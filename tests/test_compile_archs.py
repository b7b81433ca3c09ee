"""Every Triton kernel compiles for every promised architecture, on a machine without any GPU.

In a process of its own: the interpreter, which the CPU tests run in, replaces triton.jit.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory that one program may use, of the smallest card of each architecture.
SHARED = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "sm120": 101376, "gfx942": 65536}

COMPILE = """
import importlib, json, sys
import triton
from pathlib import Path
from kernels import get_local_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, sys.argv[1])
from arch_cases import CASES, jit_functions

dsv4 = get_local_kernel(Path(sys.argv[2]))
target, name, shared = GPUTarget(*json.loads(sys.argv[3])), sys.argv[4], int(sys.argv[5])
done, elsewhere = set(), set()
for case in CASES:
    if case.archs and name not in case.archs:
        elsewhere.add((case.module, case.kernel))
        continue
    kernel = getattr(importlib.import_module(f"{dsv4.__name__}.{case.module}"), case.kernel)
    signature, constants, attributes = case.specialise(kernel, target.arch)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=target, options=dict(num_warps=case.num_warps, enable_fp_fusion=False) | case.options)
    binary = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
    assert len(binary) > 1000
    assert compiled.metadata.shared <= shared, f"{case.name}: {compiled.metadata.shared} bytes, more than the smallest card has"
    done.add((case.module, case.kernel))
    print(case.name, compiled.metadata.shared, "bytes shared")
missing = jit_functions(dsv4, entry_points=True) - done - elsewhere
assert not missing, f"no case compiles {missing}"
print("compiled", len(CASES))
"""


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles(built, arch, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [str(ROOT / "tests"), str(built), json.dumps(TARGETS[arch]), arch, str(SHARED[arch])]
    run = subprocess.run([sys.executable, "-c", COMPILE, *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "compiled" in run.stdout
