"""What every op's benchmark shares: a case, its passes, and the check against fp64.

An op's file describes cases; nothing here knows an op. A provider is one way to compute a case (ours, transformers' own
code, torch.compile of it, another library); `eager` is transformers' own and sets the error that is allowed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .timers import capture

Tensors = dict[str, torch.Tensor]
Results = tuple[torch.Tensor, ...]

GRAD_PASSES = ("backward", "full")
OURS_SLACK = 1.001  # equal rounding, other order of operations
PEER_SLACK = 2.0  # a peer need not be as exact as transformers; it must compute the same function
FP32_SUMS = 8 * torch.finfo(torch.float32).eps  # two right fp32 sums in different orders differ by about this much


@dataclass(frozen=True)
class Work:
    """The least a pass must do: bytes (each input read once, each output written once) and arithmetic operations."""

    bytes: int
    flops: int
    unit: str = "matmul_bf16"  # the ceiling that bounds the flops

    def __add__(self, other: "Work") -> "Work":
        return replace(self, bytes=self.bytes + other.bytes, flops=self.flops + other.flops)


@dataclass(frozen=True)
class Ceilings:
    """Rates measured in this run: device-to-device copy in GB/s, matrix products in TFLOP/s by case name."""

    copy: float
    matmul: dict[str, float]

    def floor_ms(self, work: Work) -> float:
        """max(bytes / copy bandwidth, flops / matmul rate)."""
        return max(work.bytes / (self.copy * 1e6), work.flops / (self.matmul[work.unit] * 1e9))


@dataclass(frozen=True)
class Provider:
    """`call` maps the case's tensors to its results. An in-place one overwrites its inputs: forward only."""

    name: str
    call: Callable[[Tensors], Results]
    ours: bool = False
    inplace: bool = False


@dataclass(frozen=True)
class Case:
    """One workload of one op. `reference` gets the tensors in fp64 and must be differentiable in those named by `wrt`.

    `timer` "device" times on the device; "host" gives the host's time for one call.
    """

    op: str
    name: str
    passes: tuple[str, ...]
    make: Callable[[torch.device], Tensors]
    reference: Callable[[Tensors], Results]
    work: Callable[[str, bool], Work]  # (pass, in place)
    providers: tuple[Provider, ...]
    wrt: tuple[str, ...] = ()
    timer: str = "device"

    @property
    def eager(self) -> Provider:
        return next(provider for provider in self.providers if provider.name == "eager")

    def providers_of(self, pass_name: str) -> list[Provider]:
        return [p for p in self.providers if not (p.inplace and pass_name in GRAD_PASSES)]


@dataclass(frozen=True)
class Inputs:
    tensors: Tensors
    cotangents: Results

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        tensors = {k: change(t.detach()).requires_grad_(t.requires_grad) for k, t in self.tensors.items()}
        return Inputs(tensors, tuple(change(t) for t in self.cotangents))


def draw(case: Case, pass_name: str, seed: int, device: torch.device) -> Inputs:
    """Fresh random inputs; for passes with gradients also contiguous random cotangents, shaped as eager's outputs."""
    torch.manual_seed(seed)
    tensors, cotangents = case.make(device), ()
    if pass_name in GRAD_PASSES:
        with torch.no_grad():
            outputs = case.eager.call(tensors)
        cotangents = tuple(torch.randn_like(o, memory_format=torch.contiguous_format) for o in outputs)
        for name in case.wrt:
            tensors[name].requires_grad_()
    return Inputs(tensors, cotangents)


def bind(case: Case, provider: Provider, pass_name: str, inputs: Inputs) -> Callable[[], Results]:
    """The pass as a function without arguments. forward and step: outputs; backward: gradients; full: both.

    Gradients are those that `.backward()` leaves in `.grad`, as in training and in Liger-Kernel's benchmark: autograd gives
    them the memory order of their tensor, which costs a provider that returns another order a copy. The caller sets
    grad mode, so that entering it is not timed. The backward is bound to one forward, done here, and keeps its graph,
    which stores nothing that the forward had not stored.
    """
    tensors, cotangents = inputs.tensors, inputs.cotangents
    if pass_name not in GRAD_PASSES:
        return lambda: provider.call(tensors)
    leaves = [tensors[name] for name in case.wrt]

    def backward(outputs: Results, keep: bool) -> Results:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(outputs, cotangents, retain_graph=keep)
        return tuple(leaf.grad for leaf in leaves)

    if pass_name == "backward":
        outputs = provider.call(tensors)
        return lambda: backward(outputs, keep=True)

    def full() -> Results:
        outputs = provider.call(tensors)
        return (*outputs, *backward(outputs, keep=False))

    return full


def grad_mode(pass_name: str) -> torch.set_grad_enabled:
    return torch.set_grad_enabled(pass_name in GRAD_PASSES)


def to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# Checks


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """||result - exact|| / ||exact|| in fp64."""
    difference = torch.linalg.vector_norm(result.detach().double() - exact).item()
    norm = torch.linalg.vector_norm(exact).item()
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def why_red(provider: Provider, results: Results, eager: Results, exact: Results) -> str | None:
    """None if each result is as close to fp64 as eager's (times a slack), else what is wrong. NaN never passes."""
    if len(results) != len(exact):
        return f"{len(results)} results instead of {len(exact)}"
    for index, (mine, theirs, true) in enumerate(zip(results, eager, exact, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"result {index} is {mine.dtype} {tuple(mine.shape)}, eager's {theirs.dtype} {tuple(theirs.shape)}"
        error, allowed = relative_error(mine, true), relative_error(theirs, true)
        limit = allowed * (OURS_SLACK if provider.ours else PEER_SLACK) + FP32_SUMS
        if not error <= limit:
            return f"result {index} is {error:.3g} from fp64, eager {allowed:.3g}"
    return None


def results_of(case: Case, provider: Provider, pass_name: str, inputs: Inputs, like: Results, graphed: bool) -> Results:
    """One run on a copy of the inputs, with NaN where the outputs will lie."""
    own = inputs.map(torch.clone)
    call = bind(case, provider, pass_name, own)
    if not graphed:
        poison = [torch.full_like(tensor, math.nan) for tensor in like]
        del poison  # the allocator gives these blocks to the outputs: an element that nobody writes stays NaN
        return call()
    call()
    graph, results = capture([call], 1)
    with torch.no_grad():
        for tensor in results[0]:
            tensor.detach().fill_(math.nan)
        if provider.inplace:
            for name, tensor in own.tensors.items():
                tensor.copy_(inputs.tensors[name])
    graph.replay()
    torch.cuda.synchronize()
    return results[0]


def check_pass(case: Case, pass_name: str, seed: int, device: torch.device) -> dict[str, str | None]:
    """Check every provider of a pass on fresh inputs, on CUDA also as a graph replay: label -> reason or None."""
    reasons: dict[str, str | None] = {}
    with grad_mode(pass_name):
        inputs = draw(case, pass_name, seed, device)
        exact = bind(case, Provider("reference", case.reference), pass_name, inputs.map(to_double))()
        exact = tuple(tensor.detach() for tensor in exact)
        eager = bind(case, case.eager, pass_name, inputs)()
        for provider in case.providers_of(pass_name):
            for label, graphed in labels(provider, case, device):
                try:
                    results = results_of(case, provider, pass_name, inputs, eager, graphed)
                    reasons[label] = why_red(provider, results, eager, exact)
                except Exception as error:  # a case that raises is red; the other cases still run
                    reasons[label] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return reasons


def labels(provider: Provider, case: Case, device: torch.device) -> list[tuple[str, bool]]:
    """The provider's names in the records and whether each is a graph replay."""
    plain = [(provider.name, False)]
    return plain + [(f"{provider.name}_graph", True)] if device.type == "cuda" and case.timer == "device" else plain
