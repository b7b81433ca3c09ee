"""Check, then time every op against its floor and its peers, in one process.

    python benchmarks/sweep.py [--ops rope,rms_norm] [--quick] [--out FILE.jsonl] [--plot FILE.png]

Writes one JSON row a measurement and prints a table last. A red kernel is not timed, and the exit code is then 1.
Without a GPU it is a dry run: tiny sizes, perf_counter, rows for the device `cpu`, written only where --out says.
"""

import argparse
import gc
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(ROOT)  # run as a script: this folder is the package `benchmarks`

import torch
import torch._functorch.config
from tqdm import tqdm

from benchmarks import ceiling, records, rms_norm, rope
from benchmarks.harness import Case, Ceilings, Provider, bind, check_pass, draw, grad_mode, labels
from benchmarks.timers import Effort, copies_past_cache, peak_mb, time_calls, time_graph, time_host

REPO_ID, VERSION = "org/dsv4", 1
OPS = {"rope": rope.cases, "rms_norm": rms_norm.cases}


@dataclass(frozen=True)
class Run:
    """What all measurements of one run share."""

    device: torch.device
    effort: Effort
    machine: dict[str, str]  # the fields gpu, torch, triton, commit
    seeds: Iterator[int]
    tiny: bool


@dataclass(frozen=True)
class Red:
    """A provider whose result is wrong. One of ours fails the run; a peer is only left out."""

    ours: bool
    text: str


def main(arguments: list[str] | None = None, kernel: ModuleType | None = None, tiny: bool | None = None) -> int:
    """Run the sweep and give the exit code. `kernel` replaces the one built from this tree; `tiny` is a dry run."""
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed = torch.seed() % 2**31
    effort = Effort().halved() if options.quick else Effort()
    tiny = device.type == "cpu" if tiny is None else tiny
    run = Run(device, effort, machine(device, options.commit), itertools.count(seed), tiny)
    out = options.out or default_out(run)
    print(f"{run.machine['gpu']}, torch {run.machine['torch']}, first seed {seed}", file=sys.stderr)
    kernel = kernel or load_kernel()
    cases = [c for op in options.ops if op in OPS for c in OPS[op](kernel, tiny)]
    cases = [replace(c, providers=tuple(p for p in c.providers if p.name not in options.skip)) for c in cases]
    # A graph can't be captured on the default stream, and a captured backward must follow a forward on its own stream.
    side_stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()
    # Backward is timed alone, again and again on one graph; compiled code that reuses its saved tensors forbids that.
    with side_stream, torch._functorch.config.patch(donated_buffer=False):
        rows, reds = sweep(cases, run, {"ceiling", *options.ops}, out)
    if options.plot:
        records.plot(rows, options.plot)
    print(records.table(rows))
    for red in reds:
        print(f"RED{'' if red.ours else ' peer, left out'}: {red.text}")
    return int(any(red.ours for red in reds))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=words, default=[*OPS], help=f"of {','.join(OPS)}, ceiling (always measured)")
    parser.add_argument("--quick", action="store_true", help="half the repetitions")
    parser.add_argument(
        "--out", type=Path, help="JSONL; rows of the ops that ran are replaced (benchmarks/baselines/<gpu>.jsonl)"
    )
    parser.add_argument("--plot", type=Path, help="PNG of the shares of the floor")
    parser.add_argument("--commit", help="recorded in the rows; by default the checkout's")
    parser.add_argument("--skip", type=words, default=[], help="providers to leave out, such as compile")
    options = parser.parse_args(arguments)
    if unknown := {*options.ops} - {*OPS, "ceiling"}:
        parser.error(f"--ops takes {', '.join([*OPS, 'ceiling'])}, not {', '.join(sorted(unknown))}")
    if "eager" in options.skip:
        parser.error("--skip can't leave out eager: the checks compare with it")
    return options


def machine(device: torch.device, commit: str | None) -> dict[str, str]:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "commit": commit or head_commit()}


def head_commit() -> str:
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def default_out(run: Run) -> Path | None:
    slug = re.sub("[^a-z0-9]+", "-", run.machine["gpu"].lower())
    return None if run.tiny else ROOT / "benchmarks" / "baselines" / f"{slug}.jsonl"


def load_kernel() -> ModuleType:
    """Build this tree and load it as a user would."""
    from tools.build import build

    build(ROOT)
    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={ROOT}"
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION)


def sweep(cases: list[Case], run: Run, replaced: set[str], out: Path | None) -> tuple[list[records.Row], list[Red]]:
    """Measure the ceilings, then the cases. The file is written after each: a run that is cut off loses one case."""
    kept = [row for row in records.read(out) if row["op"] not in replaced] if out else []
    limits = ceiling.measure(run.device, run.effort, run.tiny)
    ceilings, rows, reds = ceiling.ceilings(limits), [ceiling_row(limit, run) for limit in limits], []
    if out:
        records.write(out, kept + rows)
    gc.freeze()  # each graph capture and peak collects garbage: let it not walk the libraries
    with tqdm(total=sum(len(steps(case)) for case in cases), unit="measurement", mininterval=1) as bar:
        for case in cases:
            more_rows, more_reds = run_case(case, run, ceilings, bar)
            rows, reds = rows + more_rows, reds + more_reds
            if out:
                records.write(out, kept + rows)
    return rows, reds


def steps(case: Case) -> list[tuple[str, Provider]]:
    return [(pass_name, provider) for pass_name in case.passes for provider in case.providers_of(pass_name)]


def run_case(case: Case, run: Run, ceilings: Ceilings, bar: tqdm) -> tuple[list[records.Row], list[Red]]:
    """Check all passes of a case, then time them; if one of our own results is wrong, nothing of it is timed."""
    torch._dynamo.reset()  # each case compiles for its own shape: no dynamic shapes, no limit on recompiles
    ours = {provider.name for provider in case.providers if provider.ours}
    bad: set[tuple[str, str]] = set()
    reds = []
    for pass_name in case.passes:
        bar.set_description(f"{case.op} {case.name} {pass_name}: check", refresh=False)
        for label, reason in check_pass(case, pass_name, next(run.seeds), run.device).items():
            if reason:
                bad.add((pass_name, label))
                text = f"{case.op} {case.name} {pass_name} {label}: {reason}"
                reds.append(Red(records.kind(label)[0] in ours, text))
                bar.write(f"RED: {text}", file=sys.stderr)
    rows: list[records.Row] = []
    for pass_name, provider in steps(case):
        bar.set_description(f"{case.op} {case.name} {pass_name}: {provider.name}", refresh=False)
        if not any(red.ours for red in reds):
            good = [
                (label, graphed)
                for label, graphed in labels(provider, case, run.device)
                if (pass_name, label) not in bad
            ]
            if (provider.name, False) in good:  # a peer that fails outside of a graph is not tried inside of one
                rows += time_provider(case, pass_name, provider, good, run, ceilings)
        bar.update()
    return rows, reds


def time_provider(
    case: Case, pass_name: str, provider: Provider, good: list[tuple[str, bool]], run: Run, ceilings: Ceilings
) -> list[records.Row]:
    """The rows of one provider of one pass: with host cost and the memory peak, and replayed from a graph."""
    work = case.work(pass_name, provider.inplace)
    floor_ms = ceilings.floor_ms(work)

    def new_call():
        return bind(case, provider, pass_name, draw(case, pass_name, next(run.seeds), run.device))

    def row(label: str, ms: float, peak: float | None = None) -> records.Row:
        return records.make_row(
            **run.machine, op=case.op, case=case.name, pass_=pass_name, provider=label, ms=ms, peak_mb=peak,
            bytes=work.bytes, flops=work.flops, floor_ms=floor_ms, checked=True,
        )  # fmt: skip

    with grad_mode(pass_name):
        if case.timer == "host":
            return [row(label, time_host(new_call(), run.device)) for label, _ in good]
        peak = peak_mb(new_call, run.device)
        calls = [new_call() for _ in range(copies_past_cache(work.bytes, run.device))]
        return [
            row(label, time_graph(calls, floor_ms, run.effort))
            if graphed
            else row(label, time_calls(calls, run.effort, run.device), peak)
            for label, graphed in good
        ]


def ceiling_row(limit: ceiling.Limit, run: Run) -> records.Row:
    """A ceiling is its own floor."""
    return records.make_row(
        **run.machine, op="ceiling", case=limit.case, pass_="step", provider="torch", ms=limit.ms, peak_mb=None,
        bytes=limit.work.bytes, flops=limit.work.flops, floor_ms=limit.ms, checked=True, rate=limit.rate,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
