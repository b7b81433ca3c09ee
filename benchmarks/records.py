"""Rows of measurements: their fields, the JSONL file, the table and the plot."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FIELDS = (
    "gpu", "op", "case", "pass", "provider", "ms", "peak_mb", "bytes", "flops", "floor_ms", "checked",
    "torch", "triton", "commit",
)  # fmt: skip
PASSES = ("forward", "backward", "full", "step")
BASELINES = ("eager", "compile")


def make_row(**measured: Any) -> Row:
    """A row with exactly FIELDS, and `rate` in rows of the op `ceiling`; `pass_` stands for the field `pass`."""
    measured["pass"] = measured.pop("pass_")
    expected = {*FIELDS, "rate"} if measured["op"] == "ceiling" else {*FIELDS}
    if measured.keys() != expected:
        raise ValueError(f"fields of a row differ: {sorted(measured.keys() ^ expected)}")
    if measured["pass"] not in PASSES:
        raise ValueError(f"pass must be one of {', '.join(PASSES)}, got {measured['pass']!r}")
    if measured["checked"] is not True:
        raise ValueError(f"{measured['op']} {measured['case']}: only checked results are recorded")
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in measured.items()}
    return {key: rounded[key] for key in (*FIELDS, "rate") if key in rounded}


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line. Replaces the file at once, so that a run that is cut off leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(part, path)


def kind(provider: str) -> tuple[str, bool]:
    """The provider's name without `_graph`, and whether it was replayed from a graph."""
    return provider.removesuffix("_graph"), provider.endswith("_graph")


def ratio(row: Row, baseline: str, times: dict[tuple, float]) -> float | None:
    """The row's time over the baseline's for the same work, both from a graph or both with host cost."""
    graph = "_graph" if kind(row["provider"])[1] else ""
    other = times.get((row["op"], row["case"], row["pass"], baseline + graph))
    return row["ms"] / other if other else None


LINE = "{:31} {:8} {:18} {:>9} {:>9} {:>9} {:>6} {:>7} {:>8} {:>7}"
HEAD = ("case", "pass", "provider", "bytes", "floor ms", "ms", "share", "/eager", "/compile", "peak MB")


def table(rows: list[Row]) -> str:
    """Ceilings, then one line for each measurement of ours and of other libraries, as ratios to eager and compile."""
    times = {(r["op"], r["case"], r["pass"], r["provider"]): r["ms"] for r in rows}
    lines = [f"{r['case']:14} {r['rate']:9.1f} {unit(r)}" for r in rows if r["op"] == "ceiling"]
    lines.append(LINE.format(*HEAD))
    for r in rows:
        if r["op"] == "ceiling" or kind(r["provider"])[0] in BASELINES:
            continue
        name, share = f"{r['op']} {r['case']}", None if is_host(r) else r["floor_ms"] / r["ms"]
        eager, compiled = (number(ratio(r, baseline, times), ".2f") for baseline in BASELINES)
        times_ms = (number(r["floor_ms"], ".4g"), number(r["ms"], ".4g"), number(share, ".1%"))
        work = (number(r["bytes"], ".4g"), *times_ms, eager, compiled, number(r["peak_mb"], ".1f"))
        lines.append(LINE.format(name, r["pass"], r["provider"], *work))
    return "\n".join(lines)


def is_host(row: Row) -> bool:
    """A row of the host's cost, which has no floor on the device."""
    return row["case"].startswith("host")


def unit(ceiling: Row) -> str:
    return "TFLOP/s" if ceiling["flops"] else "GB/s"


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def plot(rows: list[Row], path: Path) -> None:
    """Share of the floor (floor time / measured time) of each case and pass, one panel an op, one mark a provider.

    Filled marks are graph replays, hollow ones include the host.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in rows if r["op"] != "ceiling" and not is_host(r)]
    groups: dict[str, list[tuple[str, str]]] = {}
    for r in rows:
        lines = groups.setdefault(r["op"], [])
        if (r["case"], r["pass"]) not in lines:
            lines.append((r["case"], r["pass"]))
    names = list(dict.fromkeys(kind(r["provider"])[0] for r in rows))
    if not groups:
        raise ValueError("no measurement of an op to plot")
    heights = [len(lines) + 2 for lines in groups.values()]
    size = (9, 0.27 * sum(heights) + 1)
    figure, axes = pyplot.subplots(
        len(groups), squeeze=False, sharex=True, height_ratios=heights, figsize=size, layout="constrained"
    )
    for axis, (op, lines) in zip(axes[:, 0], groups.items(), strict=True):
        for r in (r for r in rows if r["op"] == op):
            name, graphed = kind(r["provider"])
            style = {"marker": "o", "fillstyle": "full"} if graphed else {"marker": "s", "fillstyle": "none"}
            place = r["floor_ms"] / r["ms"], lines.index((r["case"], r["pass"]))
            axis.plot(*place, color=f"C{names.index(name)}", ms=5, **style)
        axis.set_yticks(range(len(lines)), [" ".join(line) for line in lines], fontsize=8)
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.axvline(1, color="black", lw=0.8)
        axis.grid(alpha=0.3)
        axis.set_title(op, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel(f"share of the floor, {rows[0]['gpu']} (filled: CUDA graph, hollow: with host cost)")
    axes[-1, 0].set_xlim(left=0)
    handles = [pyplot.Line2D([], [], color=f"C{i}", label=name, marker="o", ls="") for i, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
