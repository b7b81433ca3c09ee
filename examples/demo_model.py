"""The model part of the demo: fetch the kernel from the Hub, kernelize a DeepSeek-V4, compare it with the original.

demo.py runs this in a process of its own. It also runs alone where the kernel can be found, for instance with
LOCAL_KERNELS=org/dsv4=<this repository> after `make build`.
"""

import argparse
import gc
import inspect
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from demo_options import DTYPES, add_arguments
from flash_model import decode, flash_config, prompt, seeded_model
from kernels import get_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import DynamicCache


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    layers = args.layers or (4 if args.real_size else 6)
    prompt_tokens = args.prompt_tokens or (2560 if args.real_size else 300)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype_of(args.dtype or ("fp32" if device == "cpu" else "bf16"))
    reference = args.reference or ("fp32" if args.real_size else "fp64")

    kernel = get_kernel("org/dsv4", version=1, trust_remote_code=["org/dsv4"])
    print(f"loaded {kernel.__name__} from {kernel.__file__}")

    config = flash_config(layers, args.real_size)
    model = seeded_model(config, args.seed, device, dtype)
    ids = prompt(prompt_tokens, device)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else device
    weights = sum(p.numel() for p in model.parameters())
    size = f"{layers} layers, {weights / 1e9:.2f} billion weights from seed {args.seed}"
    print(f"DeepseekV4ForCausalLM: {size}, {dtype} on {where}")
    print(f"prompt: {prompt_tokens} tokens of text.txt\n")

    before, after = measure(model, (kernel.unkernelize, kernel.kernelize), ids, args.tokens, args.runs)
    report = kernel.kernelization_report(model)
    with CountCalls(kernel.__name__) as calls, torch.no_grad():
        model(ids, use_cache=False)
    del model  # the reference may need its memory
    gc.collect()
    if not fits(weights, reference, device):
        needed = weights * dtype_of(reference).itemsize / 2**30
        print(f"no {reference} reference: its weights alone take {needed:.0f} GiB\n")
        reference = "none"
    exact = None if reference == "none" else reference_logits(config, args.seed, device, dtype, ids, reference)

    print(report)
    counts = [f"{op} {count}" for op, count in calls.count.items()]
    print("\ncalls of the kernel's ops in one forward pass:", ", ".join(counts) or "none")
    print_logits(before.logits, after.logits, exact, reference)
    print_tokens(before, after)
    print_times(before, after, prompt_tokens)


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name])


@dataclass
class Measured:
    logits: torch.Tensor | None = None  # [prompt tokens, vocabulary], on the CPU
    tokens: list[int] = field(default_factory=list)  # greedy continuation
    gaps: list[float] = field(default_factory=list)  # between the two best logits, at each token
    prefills: list[float] = field(default_factory=list)  # seconds
    steps: list[float] = field(default_factory=list)  # seconds a token, of decode


@torch.no_grad()
def measure(model, preparations, ids, tokens, runs) -> list[Measured]:
    """Measure the model after each of the preparations, taking turns, so that a busy machine slows all alike."""
    results = [Measured() for _ in preparations]
    with tqdm(total=(runs + 1) * len(results) * tokens, desc="greedy tokens", leave=False, disable=None) as bar:
        for run in range(runs + 1):
            for prepare, result in zip(preparations, results):
                prepare(model)
                if run == 0:
                    result.logits = model(ids, use_cache=False).logits[0].cpu()
                result.tokens, result.gaps, seconds = greedy(model, ids, tokens, bar)
                if run > 0:  # the first run compiles kernels and fills caches
                    result.prefills.append(seconds[0])
                    result.steps.extend(seconds[1:])
    return results


def greedy(model, ids, tokens, bar):
    """Returns the tokens, the gap between the two best logits at each, and the seconds of each step."""
    cache = DynamicCache(config=model.config)
    # transformers 5.24 renamed the argument.
    cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    generated, gaps, seconds = [], [], []
    for _ in range(tokens):
        start = time.perf_counter()
        logits = model(ids, use_cache=True, logits_to_keep=1, **{cache_argument: cache}).logits[0, -1]
        best, index = logits.float().topk(2)
        generated.append(index[0].item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        gaps.append((best[0] - best[1]).item())
        ids = index[None, :1]
        bar.update()
    return generated, gaps, seconds


class CountCalls(TorchDispatchMode):
    """Counts the calls of one kernel's ops: its op namespace is the name of its module."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace, self.count = namespace, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == self.namespace:
            self.count[function.__name__.removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


class Float64Throughout(TorchFunctionMode):
    """Turns the model's own casts to float32 (norms, rotary, hyper-connections, indexer) into casts to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def widen(value):
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: widen(value) for name, value in (kwargs or {}).items()}
        return function(*map(widen, args), **kwargs)


def fits(weights, reference, device) -> bool:
    """Whether so many weights in the reference's dtype leave a tenth of the GPU free."""
    if reference == "none" or not device.startswith("cuda"):
        return True
    torch.cuda.empty_cache()
    return weights * dtype_of(reference).itemsize < 0.9 * torch.cuda.mem_get_info()[0]


@torch.no_grad()
def reference_logits(config, seed, device, dtype, ids, reference):
    """Logits of the unkernelized model with the same weights in a wider dtype."""
    model = seeded_model(config, seed, device, dtype_of(reference), rounded_to=dtype).to(dtype_of(reference))
    model.set_experts_implementation("eager")  # grouped matmul does not take float64
    if reference == "fp32":
        return model(ids, use_cache=False).logits[0].cpu()
    with Float64Throughout():
        return model(ids, use_cache=False).logits[0].cpu()


def print_logits(before, after, exact, reference):
    size = before.float().square().mean().sqrt()
    print(f"\nlogits at {before.shape[0]} positions, {before.shape[1]} each, rms {size:.2f}")
    print(f"{'difference':30} {'max':>10} {'rms':>10}")
    rows = [("kernelized - unkernelized", after, before)]
    if exact is not None:
        rows += [(f"unkernelized - {reference}", before, exact), (f"kernelized - {reference}", after, exact)]
    for name, one, other in rows:
        print("{:30} {:10.2e} {:10.2e}".format(name, *difference(one, other)))
    if exact is not None:
        casts = "its casts to float32 too" if reference == "fp64" else "experts one by one"
        print(f"({reference}: the unkernelized model with the same weights in {reference}, {casts})")


def difference(one, other):
    """Largest and root-mean-square difference; position by position in float64, to keep the memory small."""
    largest, squares = [], []
    for a, b in zip(one, other):
        row = a.double() - b.double()
        largest.append(row.abs().max().item())
        squares.append(row.square().mean().item())
    return max(largest), statistics.fmean(squares) ** 0.5


def print_tokens(before, after):
    total = len(before.tokens)
    same = next((i for i, (a, b) in enumerate(zip(before.tokens, after.tokens)) if a != b), total)
    print(f"\ngreedy tokens: {'equal' if same == total else 'differ'} ({same} of {total} before the first difference)")
    print(f"  unkernelized: {decode(before.tokens)!r}")
    print(f"  kernelized:   {decode(after.tokens)!r}")
    if same < total:
        print(f"  at token {same + 1} the unkernelized model's two best logits are {before.gaps[same]:.2g} apart")


def print_times(before, after, prompt_tokens):
    print(f"\n{'median time, ms':30} {'unkernelized':>12} {'kernelized':>12} {'ratio':>7}")
    for name, old, new in (
        (f"prefill of {prompt_tokens} tokens", before.prefills, after.prefills),
        ("decode of one token", before.steps, after.steps),
    ):
        if old:
            old, new = statistics.median(old) * 1e3, statistics.median(new) * 1e3
            print(f"{name:30} {old:12.2f} {new:12.2f} {new / old:7.2f}")


if __name__ == "__main__":
    main()
