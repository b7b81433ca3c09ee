"""Timers of calls without arguments: with host cost, replayed from a CUDA graph, host alone; and the memory peak."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], tuple[torch.Tensor, ...]]

L2_MULTIPLE = 5  # how many times the rotated inputs and outputs exceed the L2
MAX_COPIES = 256
GRAPH_MS = 0.5  # the calls of one graph last at least this long by their floor, so that its launch does not count


@dataclass(frozen=True)
class Effort:
    """How long one measurement takes, in ms; by default Liger-Kernel's do_bench settings."""

    warmup_ms: float = 25
    rep_ms: float = 100

    def halved(self) -> "Effort":
        return Effort(self.warmup_ms / 2, self.rep_ms / 2)


def copies_past_cache(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs to rotate among so that what they touch, `nbytes` each, exceeds the L2 several times."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return min(MAX_COPIES, max(2, math.ceil(L2_MULTIPLE * cache / nbytes)))


def time_calls(calls: Sequence[Call], effort: Effort, device: torch.device) -> float:
    """Median ms of one call, in rotation, with its host cost: triton.testing.do_bench; perf_counter on a CPU."""
    rotation = itertools.cycle(calls)
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(lambda: next(rotation)(), warmup=effort.warmup_ms, rep=effort.rep_ms, quantiles=[0.5])
    next(rotation)()
    times, end = [], time.perf_counter() + effort.rep_ms / 1e3
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        next(rotation)()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def capture(calls: Sequence[Call], count: int) -> tuple["torch.cuda.CUDAGraph", list]:
    """A CUDA graph of `count` calls in rotation, and the last results of each: kept, so that no two share memory.

    Captured on the current stream, where the forwards ran: autograd puts a backward on its forward's stream.
    """
    graph, results = torch.cuda.CUDAGraph(), [()] * len(calls)
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(count):
            results[index % len(calls)] = calls[index % len(calls)]()
    return graph, results


def calls_in_graph(copies: int, floor_ms: float) -> int:
    """Enough calls for GRAPH_MS by their floor, at least 8, at most MAX_COPIES; rounded up to whole rotations."""
    wanted = min(MAX_COPIES, max(8, GRAPH_MS / floor_ms))
    return math.ceil(wanted / copies) * copies


def time_graph(calls: Sequence[Call], floor_ms: float, effort: Effort) -> float:
    """Median ms of one call without host cost: replays of a graph of rotated calls, divided by their number."""
    count = calls_in_graph(len(calls), floor_ms)
    for call in calls:
        call()
    graph, _results = capture(calls, count)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    replay()
    repeats = max(10, min(200, round(effort.rep_ms / replay())))
    return statistics.median(replay() for _ in range(repeats)) / count


def time_host(call: Call, device: torch.device, calls: int = 1000, batches: int = 5) -> float:
    """Median ms that the host spends on one call: `calls` enqueued back to back, the device not waited for."""
    times = []
    for _ in range(batches + 1):  # the first batch warms up
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times[1:])


def peak_mb(make_call: Callable[[], Call], device: torch.device, runs: int = 5) -> float | None:
    """The CUDA allocator's peak in MB (2**20 bytes) over five runs of the call that `make_call` makes with its inputs.

    What the process held before those inputs were made is subtracted: only this call's tensors count.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    before = torch.cuda.memory_allocated()
    call = make_call()
    call()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
