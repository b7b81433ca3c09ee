"""Exact top-k: every backend against an oracle by stable sorting, ties, NaN, short rows, layouts, bad input."""

import math
import sys

import pytest
import torch
from cases import layouts, poison
from conftest import DEVICE
from torch._dynamo.testing import CompileCounter

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = DEVICE == "cpu"


@pytest.fixture
def topk(op):
    return op("indexer").topk


def oracle(scores, k, lengths=None):
    """Row by row in Python's order: (NaN last, larger first, index), on the visible entries alone."""
    columns = scores.shape[-1]
    rows = scores.reshape(-1, columns).double().cpu() if scores.numel() else scores.new_zeros(scores.shape[:-1].numel(), columns)
    lengths = [columns] * len(rows) if lengths is None else lengths.reshape(-1).tolist()
    values = torch.full((len(rows), k), -float("inf"), dtype=torch.float64)
    indices = torch.full((len(rows), k), -1, dtype=torch.int32)
    for row, (scores_row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        entries = scores_row[: max(length, 0)]
        order = [(math.isnan(entry), 0.0 if math.isnan(entry) else -entry, index) for index, entry in enumerate(entries)]
        for slot, (_, _, index) in enumerate(sorted(order)[:k]):
            values[row, slot], indices[row, slot] = entries[index], index
    shape = (*scores.shape[:-1], k)
    return values.reshape(shape).to(DEVICE, scores.dtype), indices.reshape(shape).to(DEVICE)


def fast_oracle(scores, k, lengths=None):
    """For rows without NaN: torch's stable sort."""
    if lengths is not None:
        hidden = torch.arange(scores.shape[-1], device=DEVICE) >= lengths[..., None]
        scores = scores.masked_fill(hidden, -float("inf"))
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    if lengths is not None:
        indices = indices.masked_fill(hidden.gather(-1, indices), -1)
    missing = max(0, k - scores.shape[-1])
    pad = torch.nn.functional.pad
    return pad(values[..., :k], (0, missing), value=-float("inf")), pad(indices[..., :k].int(), (0, missing), value=-1)


def check(got, expected):
    values, indices = got
    assert values.dtype == expected[0].dtype and indices.dtype == torch.int32
    assert values.is_contiguous() and indices.is_contiguous()
    assert torch.equal(indices, expected[1])
    assert torch.equal(values.isnan(), expected[0].isnan())
    assert torch.equal(values.nan_to_num(7.0), expected[0].nan_to_num(7.0))


def make(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


SHAPES = (
    (3, 1), (2, 3, 5), (4, 33), (2, 100), (2, 128), (64,), (3, 1000), (2, 4096), (1, 5000), (1, 16384), (1, 16385), (1, 40000),
)  # fmt: skip


@pytest.mark.parametrize("k", [1, 7, 133, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(topk, only, shape, dtype, k):
    """Sizes around the tile, k below and above the row's length; 16-bit scores tie often."""
    only("indexer")
    scores = make(shape, dtype)
    rows = scores.numel() // shape[-1]
    poison(DEVICE, rows * k * 4, rows * k * scores.element_size())
    check(topk(scores, k), fast_oracle(scores, k))


@pytest.mark.parametrize("k", [1, 2, 3, 192, 1024, 1152, 2047, 2048])
def test_any_k(topk, only, k):
    """CASES B46: no table of supported k."""
    only("indexer")
    for columns in (20, 2048, 6000, 33000):
        scores = make((2, columns), seed=k)
        check(topk(scores, k), fast_oracle(scores, k))


@pytest.mark.parametrize("columns", [131072, 262144, 262147] if INTERPRETED else [131072, 262144, 262147, 3_000_000])
def test_long_rows(topk, only, columns):
    """More than one pass; with k of 2048 three of them at 262144."""
    only("indexer")
    for k in (512, 2048):
        scores = make((1, columns), torch.bfloat16)
        check(topk(scores, k), fast_oracle(scores, k))


TIES = {
    "five values": lambda n: torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]).repeat(n // 5 + 1)[:n],
    "zeros": torch.zeros,
    "both zeros": lambda n: torch.tensor([-0.0, 0.0, -0.0]).repeat(n // 3 + 1)[:n],
    "steps": lambda n: (torch.arange(n) // 7).float(),
    "falling": lambda n: -torch.arange(n).float(),
    "all -inf": lambda n: torch.full((n,), -float("inf")),
    "all inf": lambda n: torch.full((n,), float("inf")),
    "one spike": lambda n: torch.cat((torch.zeros(n - 1), torch.ones(1))),
    "neighbouring floats": lambda n: (0x3F800000 + torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)).view(torch.float32),
    "subnormal": lambda n: (torch.arange(n, dtype=torch.int32) % 1000 - (1 << 31) * (torch.arange(n) % 2)).to(torch.int32).view(torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("columns", [4096, 20000])
@pytest.mark.parametrize("name", TIES)
def test_ties_go_to_the_lower_index(topk, only, name, columns):
    """CASES B44: also where equal scores compete for the last slot, within a chunk of a row and across chunks."""
    only("indexer")
    scores = TIES[name](columns)[None].to(DEVICE)
    for k in (1, 512, 1000):
        expected = fast_oracle(scores, k)
        check(topk(scores, k), expected)
        assert torch.equal(topk(scores, k)[0], torch.topk(scores, k).values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_the_lowest_score(topk, only, dtype):
    """Behind -inf, by index whatever its sign and payload, and before what is not visible."""
    only("indexer")
    inf, nan = float("inf"), float("nan")
    row = torch.tensor([nan, 1.0, -inf, -nan, inf, -0.0, 0.0, nan, -inf, -1.0], dtype=dtype)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    row.view(bits)[7] = -1  # all bits set
    scores = torch.stack((row, row.flip(0), torch.full_like(row, nan))).to(DEVICE)
    lengths = torch.tensor([10, 8, 3], device=DEVICE)
    for k in (3, 6, 9, 12):
        check(topk(scores, k), oracle(scores, k))
        check(topk(scores, k, lengths), oracle(scores, k, lengths))
    assert topk(scores, 12)[1][0].tolist() == [4, 1, 5, 6, 9, 2, 8, 0, 3, 7, -1, -1]
    long = make((1, 20000), dtype)
    long[0, ::2] = nan
    check(topk(long, 2000), fast_oracle(long.nan_to_num(-inf), 2000))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [3, 64, 1000, 20000])
def test_lengths(topk, only, columns, dtype):
    """CASES B45: beyond what is visible -1 and -inf, whatever stands there; lengths out of range count as 0 and N."""
    only("indexer")
    top = torch.iinfo(dtype)
    lengths = [0, 1, 2, columns // 2, columns - 1, columns, columns + 1, -1, top.min, top.max]
    lengths = torch.tensor(lengths, dtype=dtype, device=DEVICE)
    visible = lengths.clamp(0, columns)
    scores = make((len(lengths), columns))
    scores = scores.masked_fill(torch.arange(columns, device=DEVICE) >= visible[:, None], float("inf"))
    for k in (1, 7, 512):
        values, indices = topk(scores, k, lengths)
        check((values, indices), fast_oracle(scores, k, visible))
        assert torch.equal((indices >= 0).sum(-1), visible.clamp(max=k).long())
    hidden = scores.masked_fill(torch.arange(columns, device=DEVICE) >= visible[:, None], float("nan"))
    check(topk(hidden, 7, lengths), fast_oracle(scores, 7, visible))


def test_causal_lengths_of_csa(topk, only):
    """CASES B45: query q sees (q + 1) // 4 entries of three, and those are all selected."""
    only("indexer")
    lengths = ((torch.arange(16, device=DEVICE) + 1) // 4).clamp(max=3).expand(2, 16)
    scores = make((2, 16, 3))
    values, indices = topk(scores, 512, lengths)
    check((values, indices), fast_oracle(scores, 512, lengths))
    assert torch.equal((indices >= 0).sum(-1), lengths)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0), (0,), (2, 0, 0)], ids=str)
def test_nothing(topk, only, shape):
    only("indexer")
    scores = torch.empty(shape, device=DEVICE)
    poison(DEVICE, 3 * 5 * 4)
    for lengths in (None, torch.zeros(shape[:-1], dtype=torch.int32, device=DEVICE)):
        values, indices = topk(scores, 5, lengths)
        assert values.shape == indices.shape == (*shape[:-1], 5)
        assert (values == -float("inf")).all() and (indices == -1).all()
    values, indices = topk(make((2, 7)), 0)
    assert values.shape == indices.shape == (2, 0) and indices.dtype == torch.int32


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (2, 7, 33), (5, 200)], ids=str)
def test_any_layout(topk, only, shape):
    only("indexer")
    plain = make(shape, torch.bfloat16)
    lengths = torch.randint(0, shape[-1] + 1, shape[:-1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = topk(plain, 16, lengths)
    check(expected, fast_oracle(plain, 16, lengths))
    for name, scores in layouts(plain):
        assert all(torch.equal(a, b) for a, b in zip(topk(scores, 16, lengths), expected, strict=True)), name
    for name, view in layouts(lengths.float()):  # float for its filling with NaN
        turned = torch.empty_strided(view.shape, view.stride(), dtype=torch.int32, device=DEVICE).copy_(lengths)
        assert all(torch.equal(a, b) for a, b in zip(topk(plain, 16, turned), expected, strict=True)), name
    shared = lengths[..., :1].expand(lengths.shape)
    check(topk(plain, 16, shared), fast_oracle(plain, 16, shared))
    turned = make((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    check(topk(turned, 16), fast_oracle(turned, 16))


def test_many_strided_dimensions(topk, only):
    backend = only("indexer")
    scores = make((3, 3, 3, 3, 3, 16))[::2, ::2, ::2, ::2, ::2]
    if backend == "reference":
        check(topk(scores, 4), fast_oracle(scores, 4))
    else:
        with pytest.raises(NotImplementedError, match=r"triton: the leading dimensions \(strides .* don't merge into 3"):
            topk(scores, 4)


def test_repeated_runs_are_equal(topk, only):
    """CASES B44: the same bits on 20 runs, with ties; a row's result depends on the row alone."""
    only("indexer")
    scores = make((4, 20000), torch.bfloat16)
    runs = []
    for _ in range(20 if not INTERPRETED else 3):
        poison(DEVICE, 4 * 512 * 4, 4 * 2 * 512 * 4)
        runs.append(topk(scores, 512))
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    alone = topk(scores[2:3], 512)
    assert all(torch.equal(a[0], b[2]) for a, b in zip(alone, runs[0], strict=True))


@pytest.mark.skipif(INTERPRETED, reason="streams need a GPU")
def test_two_streams(topk):
    scores = make((64, 20000), torch.bfloat16)
    expected = topk(scores, 512)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(topk(scores, 512))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for run in results for a, b in zip(run, expected, strict=True))


def test_no_gradient(topk, only):
    only("indexer")
    scores = make((3, 64)).requires_grad_()
    values, indices = topk(scores, 5)
    assert not values.requires_grad and not indices.requires_grad
    compiled = torch.compile(lambda scores: topk(scores, 5), fullgraph=True, backend="aot_eager")
    assert not compiled(scores)[0].requires_grad


def test_offsets_past_int32(topk, only):
    """CASES B47: row strides below 2^31 whose product with the row is not, and columns far apart."""
    backend = only("indexer")
    if INTERPRETED and backend == "triton":
        pytest.skip("the interpreter copies the whole storage; the GPU and the reference run this")
    compact, far = make((3, 64), torch.bfloat16), 2**30 + 64
    for stride, rows in (((far, 1), compact), ((1, far), compact[:, :3])):
        scores = torch.empty(2 * far + 64, dtype=torch.bfloat16, device=DEVICE).as_strided(rows.shape, stride)
        scores.copy_(rows)
        check(topk(scores, 5), fast_oracle(rows, 5))


BAD = {
    "integer scores": (dict(scores=torch.int32), TypeError, "scores must be float16, bfloat16 or float32, got torch.int32"),
    "fp64 scores": (dict(scores=torch.float64), TypeError, "scores must be float16, bfloat16 or float32, got torch.float64"),
    "no tensor": (dict(scores=[1.0]), TypeError, "scores must be a torch.Tensor, got list"),
    "scalar": (dict(scores=()), ValueError, "scores must have at least one dimension"),
    "negative k": (dict(k=-1), ValueError, "k must be from 0 to 2048, got -1"),
    "large k": (dict(k=2049), ValueError, "k must be from 0 to 2048, got 2049"),
    "float k": (dict(k=2.0), TypeError, "k must be an int, got float"),
    "bool k": (dict(k=True), TypeError, "k must be an int, got bool"),
    "float lengths": (dict(lengths=torch.float32), TypeError, "lengths must be int32 or int64, got torch.float32"),
    "lengths of columns": (dict(lengths=(3, 64)), ValueError, r"lengths must have shape \(3,\), one for each row.*got \(3, 64\)"),
    "one length": (dict(lengths=(1,)), ValueError, r"lengths must have shape \(3,\)"),
    "int lengths": (dict(lengths=5), TypeError, "lengths must be a torch.Tensor or None, got int"),
    "another device": (dict(lengths="meta"), ValueError, "lengths is on meta and scores is on"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(topk, name):
    changes, error_type, message = BAD[name]
    arguments = dict(scores=make((3, 64)), k=2, lengths=torch.full((3,), 64, device=DEVICE))
    for key, change in changes.items():
        if isinstance(change, tuple):
            arguments[key] = torch.ones(change, device=DEVICE, dtype=arguments[key].dtype)
        elif isinstance(change, torch.dtype) or change == "meta":
            arguments[key] = arguments[key].to(change)
        else:
            arguments[key] = change
    topk(make((3, 64)), 1)  # what is remembered for k = 1 serves no True
    topk(make((3, 64)), 2)
    with pytest.raises(error_type, match=message):
        topk(**arguments)


def test_opcheck(op, only):
    only("indexer")
    registered = op("indexer").ops.topk.default
    lengths = torch.tensor([3, 40, 100], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(registered, (make((2, 40, 3)).transpose(1, 2), 5, None))
    torch.library.opcheck(registered, (make((3, 40), torch.bfloat16), 64, lengths))


def test_meta_tensors_give_meta_results(topk):
    scores = make((2, 5, 3, 16))
    topk(scores, 4)
    values, indices = topk(scores.to("meta"), 4)
    assert values.is_meta and indices.is_meta and values.shape == indices.shape == (2, 5, 3, 4)


def inputs(rows, columns=40):
    lengths = torch.randint(0, columns, (2, rows), generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.int32)
    return make((2, rows, columns), seed=rows), lengths


def test_fullgraph(topk):
    scores, lengths = inputs(5)
    compiled = torch.compile(lambda scores, lengths: topk(scores, 7, lengths), fullgraph=True, backend="aot_eager")
    check(compiled(scores, lengths), topk(scores, 7, lengths))


def test_no_recompile_per_row_count(topk):
    counter = CompileCounter()
    compiled = torch.compile(lambda scores, lengths: topk(scores, 7, lengths), fullgraph=True, backend=counter)
    for rows in (7, 5, 2, 3, 16, 33, 1):
        scores, lengths = inputs(rows)
        check(compiled(scores, lengths), topk(scores, 7, lengths))
    assert counter.frame_count <= 3, counter.frame_count


def test_no_recompile_per_row_length(topk):
    counter = CompileCounter()
    compiled = torch.compile(lambda scores, lengths: topk(scores, 7, lengths), fullgraph=True, backend=counter)
    for columns in (40, 41, 50, 64, 100, 33):
        scores, lengths = inputs(3, columns)
        check(compiled(scores, lengths), topk(scores, 7, lengths))
    assert counter.frame_count <= 2, counter.frame_count


@pytest.mark.parametrize("k", [1, 2, 7, 64, 512, 1000, 2048])
@pytest.mark.parametrize("columns", [1, 31, 33, 1000, 16384, 16385, 262144, 10_000_000])
def test_configs_cover_the_row(op, columns, k):
    configs = sys.modules[op("indexer").__package__ + ".configs"]
    passes = configs.choose_select_configs(columns, k)
    assert passes[-1].chunks == 1 and len(passes) <= 5
    for config in passes:
        width = config.per_thread * config.threads
        assert k <= width <= configs.TILE and config.chunks * width >= columns > (config.chunks - 1) * width
        # The bound from below holds for k groups or more; each has entries.
        assert k <= config.groups <= width and config.groups % config.threads == 0
        assert all(size & (size - 1) == 0 for size in (config.per_thread, config.threads, config.groups, config.num_warps))
        columns = config.chunks * k
    sort = configs.choose_sort_config(k)
    assert k <= sort.width < 2 * k + 1 and 1 <= sort.num_warps <= 8
