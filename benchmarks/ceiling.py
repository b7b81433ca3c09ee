"""The machine's own limits, measured in every run: copy bandwidth and matrix product rates. Floors come from them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .harness import Ceilings, Work, relative_error
from .timers import Effort, time_calls

MATMUL_ERROR = 2e-2  # bf16 output, fp8 with the tensor core's short accumulator


@dataclass(frozen=True)
class Limit:
    """A measured ceiling; rate in GB/s for copies and TFLOP/s for matrix products."""

    case: str
    ms: float
    work: Work
    rate: float


def measure(device: torch.device, effort: Effort, tiny: bool = False) -> list[Limit]:
    """Copies (the largest first) and the matrix products that the device has."""
    mib = 2**20
    sizes = {"copy_16MiB": 16 * mib} if tiny else {"copy_4GiB": 4096 * mib, "copy_512MiB": 512 * mib}
    limits = [copy(case, nbytes, device, effort) for case, nbytes in sizes.items()]
    limits += matmuls(256 if tiny else 8192, device, effort)
    return limits


def ceilings(limits: list[Limit]) -> Ceilings:
    """The rates that floors use: the largest copy, and every matrix product by its case name."""
    copies = [limit for limit in limits if not limit.work.flops]
    return Ceilings(copies[0].rate, {limit.case: limit.rate for limit in limits if limit.work.flops})


def copy(case: str, nbytes: int, device: torch.device, effort: Effort) -> Limit:
    """Device-to-device copy of random bytes; bytes read plus bytes written count."""
    source = torch.empty(nbytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.full_like(source, -1)
    target.copy_(source)
    if not torch.equal(source, target):
        raise RuntimeError(f"{case}: the copy differs from its source")
    ms = time_calls([lambda: (target.copy_(source),)], effort, device)
    return Limit(case, ms, Work(2 * nbytes, 0), 2 * nbytes / (ms * 1e6))


def matmuls(size: int, device: torch.device, effort: Effort) -> Iterator[Limit]:
    """size^3 products of random bf16, and of e4m3 with one scale a tensor where the device has them."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield matmul("matmul_bf16", a, b, lambda: (torch.mm(a, b),), effort)
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()  # column-major, as asked
        one = torch.ones((), device=device)
        yield matmul(
            "matmul_fp8",
            a8,
            b8,
            lambda: (torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),),
            effort,
        )


def matmul(case: str, a: torch.Tensor, b: torch.Tensor, call, effort: Effort) -> Limit:
    """2 * M * N * K operations; 16 rows are checked against fp64."""
    error = relative_error(call()[0][:16], a[:16].double() @ b.double())
    if not error <= MATMUL_ERROR:
        raise RuntimeError(f"{case}: relative error {error:.3g} from fp64")
    (m, k), n = a.shape, b.shape[1]
    ms = time_calls([call], effort, a.device)
    flops = 2 * m * n * k
    nbytes = a.element_size() * (m * k + k * n) + 2 * m * n
    return Limit(case, ms, Work(nbytes, flops, case), flops / (ms * 1e9))
