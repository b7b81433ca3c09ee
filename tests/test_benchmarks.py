"""The benchmarks' pure parts, that a red kernel is never timed, and a whole sweep of tiny cases."""

import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ceiling, records, rms_norm, rope, sweep, timers
from benchmarks.harness import Ceilings, Provider, Work, bind, draw, relative_error, why_red

CPU = torch.device("cpu")
MIB = 2**20


def rotate(x, cos, sin, unsqueeze_dim=1, *, inverse=False):
    """A right kernel in plain torch: fp32 inside, rounded once."""
    return rope.reference(x.float(), cos.float(), sin.float(), inverse).to(x.dtype)


def norm(x, weight=None, eps=1e-6, *, rounding="once"):
    """A right kernel in plain torch, for each rounding."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "scale":
        return x * scale.to(x.dtype)
    if rounding == "normalized":
        return weight * (wide * scale).to(x.dtype)
    return (weight * (wide * scale)).to(x.dtype)


def kernel(**replaced):
    right = {
        "apply_rotary_pos_emb": rotate,
        "apply_rotary_pos_emb_": lambda x, *tables, **options: x.copy_(rotate(x, *tables, **options)),
        "rms_norm": norm,
    }
    return SimpleNamespace(**right | replaced)


@pytest.fixture
def run_sweep(monkeypatch, tmp_path):
    """Run tiny cases without torch.compile; gives the exit code and the rows."""
    monkeypatch.setattr(sweep, "Effort", lambda: timers.Effort(1, 2))
    monkeypatch.setattr(sweep, "time_host", lambda call, device: timers.time_host(call, device, calls=2, batches=1))
    out = tmp_path / "rows.jsonl"

    def run(the_kernel, *arguments):
        code = sweep.main(["--out", str(out), "--skip", "compile", *arguments], the_kernel, tiny=True)
        return code, records.read(out)

    yield run
    gc.unfreeze()


# Formulas


def test_rope_work_by_hand():
    # 2 tokens, 3 heads: 3072 elements in and out, tables of 2 * 32; 192 pairs at 6 operations
    assert rope.work(2, 3, "forward", False) == Work(3072 * 2 * 2 + 2 * 64 * 2, 96 * 2 * 6)
    assert rope.work(2, 3, "backward", False) == rope.work(2, 3, "forward", False)
    assert rope.work(2, 3, "full", False) == Work(2 * 12544, 2 * 1152)
    assert rope.work(2, 3, "forward", True) == Work(384 * 2 * 2 + 2 * 64 * 2, 1152)
    assert rope.work(4096, 64, "forward", False).bytes == 2 * 256 * MIB + MIB // 2
    assert rope.work(4096, 64, "forward", True).bytes == 2 * 32 * MIB + MIB // 2
    assert rope.work(4096, 64 + 1 + 64, "full", False).bytes == 4 * 516 * MIB + MIB


def test_rms_norm_work_by_hand():
    # 2 x 8 bf16: 32 bytes a tensor; the weight 32 bytes
    assert rms_norm.work(2, 8, True, 2, "forward") == Work(32 + 32 + 32, 16 * 4)
    assert rms_norm.work(2, 8, True, 2, "backward") == Work(3 * 32 + 2 * 32, 16 * 9)
    assert rms_norm.work(2, 8, True, 2, "full") == Work(96 + 160, 16 * 13)
    assert rms_norm.work(2, 8, True, 4, "forward").bytes == 32 + 64 + 32
    assert rms_norm.work(2, 8, False, 2, "full") == Work(5 * 32, 16 * 8)


def test_floor_is_the_larger_of_bytes_and_flops():
    limits = Ceilings(copy=4000.0, matmul={"matmul_bf16": 500.0, "matmul_fp8": 1000.0})
    assert limits.floor_ms(Work(4_000_000_000, 1)) == pytest.approx(1.0)
    assert limits.floor_ms(Work(1, 10**12)) == pytest.approx(2.0)
    assert limits.floor_ms(Work(1, 10**12, "matmul_fp8")) == pytest.approx(1.0)


def test_ceilings_take_the_largest_copy():
    limits = [
        ceiling.Limit("copy_4GiB", 1.0, Work(1, 0), 4200.0),
        ceiling.Limit("copy_512MiB", 1.0, Work(1, 0), 4100.0),
        ceiling.Limit("matmul_bf16", 1.0, Work(1, 1, "matmul_bf16"), 700.0),
    ]
    assert ceiling.ceilings(limits) == Ceilings(4200.0, {"matmul_bf16": 700.0})


@pytest.mark.parametrize(("copies", "floor_ms", "calls"), [(2, 0.128, 8), (5, 0.016, 35), (256, 1e-5, 256), (2, 10, 8)])
def test_calls_in_a_graph_are_whole_rotations(copies, floor_ms, calls):
    assert timers.calls_in_graph(copies, floor_ms) == calls


# The definitions that the checks compare with


@pytest.mark.parametrize(
    "case", [*rope.cases(kernel(), tiny=True), *rms_norm.cases(kernel(), tiny=True)], ids=lambda c: f"{c.op}-{c.name}"
)
def test_reference_is_transformers_function(case):
    """In fp64 the reference equals transformers' code but for that code's own fp32 and its last rounding."""
    inputs = draw(case, "forward", 1, CPU)
    wide = inputs.map(torch.Tensor.float)
    exact = bind(case, Provider("reference", case.reference), "forward", inputs.map(torch.Tensor.double))()
    for theirs, true in zip(bind(case, case.eager, "forward", wide)(), exact, strict=True):
        assert relative_error(theirs, true) < 1e-6


def test_rope_inputs_are_the_production_view():
    x = rope.make(3, {"q": 4}, CPU)["q"]
    assert x.shape == (1, 4, 3, 512) and x.stride() == (3 * 4 * 512, 512, 4 * 512, 1)


# Rows


ROW = {
    "gpu": "g", "op": "rope", "case": "q_T1", "pass_": "full", "provider": "dsv4", "ms": 0.1234567891, "peak_mb": 1.0,
    "bytes": 10, "flops": 5, "floor_ms": 0.1, "checked": True, "torch": "2", "triton": "3", "commit": "c",
}  # fmt: skip


def test_a_row_has_exactly_the_fields():
    assert tuple(records.make_row(**ROW)) == records.FIELDS
    assert records.make_row(**ROW)["ms"] == 0.123457
    assert set(records.make_row(**ROW | {"op": "ceiling", "rate": 1.0})) == {*records.FIELDS, "rate"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 1.0}, "rate"),
        ({"pass_": "twice"}, "twice"),
        ({"checked": False}, "checked"),
        ({"op": "ceiling"}, "rate"),
    ],
)
def test_a_wrong_row_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        records.make_row(**ROW | change)


def rows_of(**ms):
    return [records.make_row(**ROW | {"provider": provider, "ms": value}) for provider, value in ms.items()]


def test_table_compares_like_with_like():
    rows = rows_of(dsv4=2.0, dsv4_graph=1.0, eager=8.0, eager_graph=2.0, compile=4.0)
    plain, graph = [line.split() for line in records.table(rows).splitlines() if "dsv4" in line]
    assert plain[3:] == ["dsv4", "10", "0.1", "2", "5.0%", "0.25", "0.50", "1.0"]
    assert graph[3:] == ["dsv4_graph", "10", "0.1", "1", "10.0%", "0.50", "-", "1.0"]


def test_plot_from_jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    records.write(path, rows_of(dsv4=2.0, dsv4_graph=1.0, eager=8.0))
    records.plot(records.read(path), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "rows.jsonl.part").exists()


# Red kernels


def reason(mine, theirs, ours=True):
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return why_red(Provider("p", lambda t: (), ours=ours), (mine,), (theirs,), (exact,))


def test_what_is_red():
    exact = torch.tensor([1.0, 2.0, 3.0])
    close, far = exact * (1 + 1e-3), exact * (1 + 1.5e-3)
    assert reason(close, close) is None
    assert "eager" in reason(far, close)
    assert reason(far, close, ours=False) is None
    assert reason(torch.tensor([1.0, math.nan, 3.0]), close)
    assert reason(torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), math.nan)), "nothing can be compared with NaN"
    assert "float64" in reason(exact.double(), close)
    assert reason(exact[None], close)


def never_written(x, cos, sin, unsqueeze_dim=1, *, inverse=False):
    out = rotate(x, cos, sin, inverse=inverse).clone()
    out.detach()[..., -1, -1] = math.nan
    return out


def fails(*_, **__):
    raise ValueError("no backend")


RED_KERNELS = {
    "wrong sign": lambda x, cos, sin, inverse=False: rotate(x, cos, -sin, inverse=inverse),
    "bf16 inside": lambda x, cos, sin, inverse=False: rope.reference(x, cos, sin, inverse),
    "an element left out": never_written,
    "inverse ignored": lambda x, cos, sin, inverse=False: rotate(x, cos, sin),
    "raises": fails,
}


@pytest.mark.parametrize("fault", RED_KERNELS)
def test_a_red_kernel_is_not_timed(fault, run_sweep, capsys):
    code, rows = run_sweep(kernel(apply_rotary_pos_emb=RED_KERNELS[fault]), "--ops", "rope")
    assert code == 1
    assert "RED: rope agg_T16 full dsv4: " in capsys.readouterr().out
    assert "agg_T16" not in {row["case"] for row in rows}
    assert {row["op"] for row in rows} >= {"ceiling"}, "the other rows are kept"


def test_a_red_backward_stops_the_case(run_sweep, capsys):
    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return norm(x, weight, rounding=rms_norm.rounding())

        @staticmethod
        def backward(ctx, grad):
            return grad.to(torch.bfloat16), torch.zeros(grad.shape[-1], device=grad.device)

    def wrong(x, weight=None, eps=1e-6, *, rounding="once"):
        return norm(x, None, rounding=rounding) if weight is None else WrongBackward.apply(x, weight)

    code, rows = run_sweep(kernel(rms_norm=wrong), "--ops", "rms_norm")
    assert code == 1 and "RED: rms_norm 8x64 backward dsv4: " in capsys.readouterr().out
    assert {row["case"] for row in rows if row["op"] == "rms_norm"} == {"8x32_unweighted", "host_tiny"}


@pytest.mark.parametrize("peer", [lambda x, weight: norm(x, weight) * 2, fails], ids=["wrong", "raises"])
def test_a_red_peer_is_left_out(peer, run_sweep, monkeypatch, capsys):
    monkeypatch.setattr(rms_norm, "liger_norm", lambda: {"liger": peer})
    code, rows = run_sweep(kernel(), "--ops", "rms_norm")
    assert code == 0 and "RED peer, left out: rms_norm 8x64 forward liger: " in capsys.readouterr().out
    assert not any(row["provider"].startswith("liger") for row in rows)


# A whole sweep


def test_sweep_end_to_end(run_sweep, tmp_path, capsys):
    old = [{"op": "rope", "case": "old"}, {"op": "moe", "case": "kept"}, {"op": "ceiling", "case": "old"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    code, rows = run_sweep(kernel(), "--plot", str(tmp_path / "plot.png"), "--commit", "abc")
    assert code == 0
    assert [row for row in rows if row["case"] in ("old", "kept")] == [old[1]]
    rows = [row for row in rows if row["op"] != "moe"]
    assert all({*row} - {"rate"} == {*records.FIELDS} and row["ms"] > 0 and row["checked"] for row in rows)
    assert {row["commit"] for row in rows} == {"abc"}
    assert {row["gpu"] for row in rows} == {torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}

    measured = {(row["op"], row["case"], row["pass"], row["provider"]) for row in rows}
    graph = ("", "_graph") if torch.cuda.is_available() else ("",)
    for suffix in graph:
        for pass_name in ("forward", "backward", "full"):
            assert {("rope", "q_T16", pass_name, p + suffix) for p in ("dsv4", "eager")} <= measured
            assert ("rms_norm", "8x64", pass_name, "dsv4" + suffix) in measured
        assert ("rope", "q_T16", "forward", "dsv4_inplace" + suffix) in measured
        assert ("rope", "agg_T16", "full", "dsv4" + suffix) in measured
    assert ("rope", "q_T16", "full", "dsv4_inplace") not in measured
    assert {("rope", "host_tiny", "step", "dsv4_inplace"), ("rms_norm", "host_tiny", "step", "dsv4")} <= measured
    assert (tmp_path / "plot.png").exists()
    assert "rope agg_T16" in capsys.readouterr().out


def test_ceilings_alone(run_sweep):
    code, rows = run_sweep(kernel(), "--ops", "ceiling")
    assert code == 0 and {row["op"] for row in rows} == {"ceiling"}
    assert all(row["rate"] > 0 for row in rows)


@pytest.mark.parametrize(("arguments", "message"), [(["--ops", "rope,rpoe"], "rpoe"), (["--skip", "eager"], "eager")])
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        sweep.main(arguments, kernel())
    assert message in capsys.readouterr().err


def test_the_hubs_runner_verifies_every_workload(built):
    from kernels.cli.benchmark import discover_benchmark_classes, run_benchmark_class

    script = Path(sweep.__file__).with_name("benchmark.py")
    for benchmark in discover_benchmark_classes(script, script.parent):
        results, _ = run_benchmark_class(
            benchmark, iterations=1, warmup=0, repo_id=str(built), is_local=True, revision="local"
        )
        assert results and all(result.verified for result in results.values())
