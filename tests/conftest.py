"""Load the kernel as a user does: built, then through `get_kernel` with LOCAL_KERNELS pointing at the build.

DSV4_TEST_DEVICE is `cpu` (Triton kernels run in the interpreter, beside the reference) or `cuda`; the default is `cuda`
where there is one. The tests are the same on both.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

DEVICE = os.environ.setdefault("DSV4_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
if DEVICE == "cpu":
    # Read by triton.jit at decoration, so it must stand before the kernel is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest


def _round_as_hardware_does():
    """Triton's interpreter (3.6, 3.7) truncates floats to bf16 where every GPU rounds to nearest even."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, source, target, rounding_mode):
        if target != tl.bfloat16 or source not in (tl.float32, tl.float64):
            return convert(data, source, target, rounding_mode)
        return torch.tensor(data).to(torch.bfloat16).view(torch.uint16).numpy()

    interpreter._convert_float = rounded


def _multiply_bf16_as_numbers():
    """Triton's interpreter (3.6, 3.7) multiplies the raw 16-bit integers of bf16 operands of tl.dot."""
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(self, a, b, d, *options):
        a, b = (
            interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return multiply(self, a, b, d, *options)

    interpreter.InterpreterBuilder.create_dot = widened


if DEVICE == "cpu":
    _round_as_hardware_does()
    _multiply_bf16_as_numbers()

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder whose `build/` holds every variant of the working tree."""
    from tools.build import build

    out = tmp_path_factory.mktemp("kernel")
    build(ROOT, out / "build")
    return out


@pytest.fixture(scope="session")
def dsv4(built):
    from kernels import get_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"org/dsv4={built}")
        return get_kernel("org/dsv4", version=1, trust_remote_code=["org/dsv4"])


@pytest.fixture(scope="session")
def op(dsv4):
    """The `op` module of an op by name: functions of the package hide subpackages of the same name."""
    return lambda name: importlib.import_module(f"{dsv4.__name__}.{name}.op")


BACKENDS = {"cpu": ("triton", "reference"), "cuda": ("triton",)}


@pytest.fixture(params=BACKENDS[DEVICE])
def only(request, monkeypatch, dsv4, op):
    """Call it with an op's name to leave that op one backend; returns the backend's name."""

    def only(name):
        module = op(name)
        dispatch = importlib.import_module(f"{dsv4.__name__}.common.dispatch")
        monkeypatch.setattr(module, "BACKENDS", dispatch.Backends(module.__package__, request.param))
        return request.param

    return only
