"""RMSNorm: every backend and rounding order against float64, gradients, layouts, bad input."""

import importlib

import pytest
import torch
from cases import DTYPES, NORM_SHAPES, layouts, poison
from compare import assert_no_further, error
from conftest import DEVICE


def theirs(x, weight, eps, rounding):
    """transformers' lines: 5.20 and later, 5.17 to 5.19, and the unweighted norm."""
    hidden = x.to(torch.float32)
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "scale":
        return x * scale.to(x.dtype)
    weight = torch.ones((), device=x.device) if weight is None else weight
    if rounding == "normalized":
        return weight * (hidden * scale).to(x.dtype)
    return (weight * (hidden * scale)).to(x.dtype)


def exact(x, weight, eps):
    x = x.double()
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normalized if weight is None else normalized * weight.double()


def make(shape, dtype=torch.float32, seed=0):
    """Rows of different sizes, among them one of zeros and one of 1e4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = x.view(-1, shape[-1]) if x.numel() else x
    if rows.dim() == 2 and len(rows) > 2:
        rows[0], rows[1] = 0, rows[1].sign() * 1e4
    return x.to(DEVICE, dtype)


def make_weight(width, dtype=torch.float32, near_one=True):
    weight = torch.randn(width, generator=torch.Generator().manual_seed(7))
    return (1 + 0.5 * weight if near_one else 0.03 * weight).to(DEVICE, dtype)


WEIGHTED = [("once", torch.float32), ("once", torch.bfloat16), ("normalized", torch.float32), ("normalized", torch.bfloat16)]
MODES = [*WEIGHTED, ("once", None), ("normalized", None), ("scale", None)]
MODE_IDS = [f"{rounding}-{str(dtype).removeprefix('torch.')}" for rounding, dtype in MODES]


@pytest.mark.parametrize(("rounding", "weight_dtype"), MODES, ids=MODE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_forward(dsv4, only, shape, dtype, rounding, weight_dtype):
    only("rms_norm")
    x = make(shape, dtype)
    weight = None if weight_dtype is None else make_weight(shape[-1], weight_dtype)
    poison(DEVICE, x.numel() * x.element_size())
    out = dsv4.rms_norm(x, weight, 1e-6, rounding=rounding)
    expected = theirs(x, weight, 1e-6, rounding)
    if dtype == torch.float64 or (weight is None and rounding != "scale"):
        expected = expected.to(dtype)  # transformers' fp32 weight and fp32 inside don't set our dtype there
    assert_no_further(out, expected, exact(x, weight, 1e-6))


@pytest.mark.parametrize("near_one", [True, False], ids=["weight_near_1", "weight_near_0"])
@pytest.mark.parametrize("width", [512, 1024, 4096, 7168])
def test_one_rounding(dsv4, only, width, near_one):
    """"once" is the correctly rounded result but for fp32 noise; "normalized" has two roundings."""
    only("rms_norm")
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    weight = make_weight(width, near_one=near_one)
    once = dsv4.rms_norm(x, weight, rounding="once")
    normalized = dsv4.rms_norm(x, weight, rounding="normalized")
    assert once.dtype == torch.bfloat16 and normalized.dtype == torch.float32
    best = exact(x, weight, 1e-6).to(torch.bfloat16)
    assert (once != best).float().mean() < 1e-3
    assert (normalized.to(torch.bfloat16) != best).float().mean() > 0.1


def test_eps_counts_and_sums_are_fp32(dsv4, only):
    """at mean square 1e-6 the eps decides, and small terms beside a large one are not lost."""
    only("rms_norm")
    x = 1e-3 * make((3, 512), torch.bfloat16)[2:]
    for eps in (1e-6, 1e-5):
        assert error(dsv4.rms_norm(x, None, eps), exact(x, None, eps)) < 2**-7
    ratio = (dsv4.rms_norm(x, None, 1e-6) / dsv4.rms_norm(x, None, 1e-5)).float().mean()
    assert 2 < ratio < 2.7
    spike = torch.full((1, 4001), 0.1, dtype=torch.float16, device=DEVICE)
    spike[0, 0] = 300
    assert error(dsv4.rms_norm(spike), exact(spike, None, 1e-6)) < 2**-10


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (2, 7, 33), (5, 200)], ids=str)
def test_any_layout(dsv4, only, shape):
    only("rms_norm")
    weight = make_weight(shape[-1])
    plain = make(shape, torch.bfloat16)
    expected = dsv4.rms_norm(plain, weight)
    for name, x in layouts(plain):
        assert torch.equal(dsv4.rms_norm(x, weight), expected), name
    for name, view in layouts(weight):
        assert torch.equal(dsv4.rms_norm(plain, view), expected), name


def test_transposed_heads_keep_their_memory_order(dsv4, only):
    """q_b_norm sees [B, H, T, D] as a view of [B, T, H, D]; rope after it should read memory in order."""
    only("rms_norm")
    q = make((2, 5, 3, 64)).transpose(1, 2)
    assert dsv4.rms_norm(q).stride() == q.stride()


def test_many_strided_dimensions(dsv4, only):
    backend = only("rms_norm")
    x = make((3, 3, 3, 3, 3, 16))[::2, ::2, ::2, ::2, ::2]
    if backend == "reference":
        assert error(dsv4.rms_norm(x), exact(x, None, 1e-6)) < 1e-6
    else:
        with pytest.raises(NotImplementedError, match=r"triton: the leading dimensions \(strides .* don't merge into 3"):
            dsv4.rms_norm(x)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 512), (2, 3, 4, 33), (1, 7168), (2, 0, 64), (64,)], ids=str)
def test_backward(dsv4, only, shape, dtype, weight_dtype):
    backend = only("rms_norm")
    if (DEVICE, backend, dtype, weight_dtype) == ("cpu", "triton", torch.float64, torch.bfloat16):
        pytest.skip("the interpreter stores fp64 to bf16 as integers; the GPU runs this")
    # Rows of 1e4 and 0 are forward cases: their gradients differ by 1e10, and no norm over rows sees the small ones.
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    weight = None if weight_dtype is None else make_weight(shape[-1], weight_dtype)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    poison(DEVICE, x.numel() * x.element_size(), 4 * shape[-1])

    def grads(function, x, weight, dout):
        leaves = [x.detach().requires_grad_()] + ([] if weight is None else [weight.detach().requires_grad_()])
        out = function(*leaves, *([None] if weight is None else []))
        return torch.autograd.grad(out, leaves, dout.to(out.dtype))

    ours = grads(lambda x, w: dsv4.rms_norm(x, w, 1e-6), x, weight, dout)
    host = grads(lambda x, w: theirs(x, w, 1e-6, "once" if w is not None else "scale"), x, weight, dout)
    best = grads(lambda x, w: exact(x, w, 1e-6), x.double(), None if weight is None else weight.double(), dout.double())
    for mine, theirs_grad, truth in zip(ours, host, best, strict=True):
        assert_no_further(mine, theirs_grad, truth)


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (9, 33)], ids=str)
def test_backward_any_layout(dsv4, only, shape):
    only("rms_norm")
    weight = make_weight(shape[-1]).requires_grad_()
    plain, dout = make(shape, seed=4), make(shape, seed=5)

    def grads(x, cotangent):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(dsv4.rms_norm(x, weight), (x, weight), cotangent)

    expected = grads(plain, dout)
    for name, x in layouts(plain):
        for other, cotangent in layouts(dout):
            dx, dweight = grads(x, cotangent)
            # Another layout may sum a row, or the rows, in another order.
            torch.testing.assert_close(dx, expected[0], rtol=1e-5, atol=1e-6, msg=f"{name}, {other}")
            torch.testing.assert_close(dweight, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 131, 132, 133, 188, 189])
def test_weight_gradient_of_any_row_count(dsv4, only, rows):
    """rows split over programs must all be counted, whatever the count."""
    only("rms_norm")
    x, weight = torch.ones(rows, 8, device=DEVICE), torch.ones(8, device=DEVICE, requires_grad=True)
    dsv4.rms_norm(x, weight, eps=0.0).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((8,), float(rows), device=DEVICE))


def test_backward_is_deterministic(dsv4, only):
    only("rms_norm")
    x, weight = make((500, 96), torch.bfloat16, seed=9), make_weight(96).requires_grad_()
    runs = []
    for _ in range(5):
        poison(DEVICE, 96 * 4 * 32)
        runs.append(torch.autograd.grad(dsv4.rms_norm(x, weight).float().square().sum(), weight)[0])
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_gradcheck(dsv4, only):
    only("rms_norm")
    x = make((3, 2, 5), torch.float64, seed=3)[1:].detach().requires_grad_()
    weight = make_weight(5, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: dsv4.rms_norm(x, w, 1e-3), (x, weight), atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: dsv4.rms_norm(x, None, 1e-3), x, atol=1e-6)
    (grad,) = torch.autograd.grad(dsv4.rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm can be differentiated once"):
        grad.sum().backward()


def test_offsets_past_int32(dsv4, only):
    """row strides below 2^31 whose product with the row is not."""
    only("rms_norm")
    stride = 2**30 + 64
    x = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 64), (stride, 1))
    compact = make((3, 64), torch.bfloat16)
    x.copy_(compact)
    assert torch.equal(dsv4.rms_norm(x), dsv4.rms_norm(compact))


BAD = {
    "weight too long": (dict(weight=(65,)), ValueError, r"weight must have shape \(64,\), x's last dimension, got \(65,\)"),
    "weight of rows": (dict(weight=(3, 64)), ValueError, r"weight must have shape \(64,\).*got \(3, 64\)"),
    "integer x": (dict(x=torch.int32), TypeError, "x must be float16, bfloat16, float32 or float64, got torch.int32"),
    "integer weight": (dict(weight=torch.int64), TypeError, "weight must be float16.*got torch.int64"),
    "another device": (dict(weight="meta"), ValueError, "weight is on meta and x is on"),
    "scalar": (dict(x=()), ValueError, "x must have at least one dimension"),
    "rounding": (dict(rounding="twice"), ValueError, "rounding must be one of once, normalized, scale, got 'twice'"),
    "rounding as list": (dict(rounding=["once"]), ValueError, r"rounding must be one of .*got \['once'\]"),
    "no eps": (dict(eps=None), TypeError, "eps must be a float, got None"),
    "eps True": (dict(eps=True), TypeError, "eps must be a float, got True"),
    "negative eps": (dict(eps=-1.0), ValueError, "eps must be finite and not negative, got -1.0"),
    "nan eps": (dict(eps=float("nan")), ValueError, "eps must be finite"),
    "weighted scale": (dict(rounding="scale"), ValueError, "rounding='scale' is the unweighted norm's"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(dsv4, name):
    changes, error_type, message = BAD[name]
    arguments = dict(x=make((3, 64)), weight=make_weight(64))
    for key, change in changes.items():
        if isinstance(change, tuple):
            arguments[key] = torch.ones(change, device=DEVICE)
        elif isinstance(change, torch.dtype) or change == "meta":
            arguments[key] = arguments[key].to(change)
        else:
            arguments[key] = change
    with pytest.raises(error_type, match=message):
        dsv4.rms_norm(**arguments)


def test_rows_too_wide_are_refused(dsv4, only):
    backend = only("rms_norm")
    x = make((1, 32769))
    if backend == "reference":
        assert error(dsv4.rms_norm(x), exact(x, None, 1e-6)) < 1e-6
    else:
        with pytest.raises(NotImplementedError, match="triton: rows of 32769 channels are wider than 32768"):
            dsv4.rms_norm(x)


@pytest.mark.parametrize("limit", [65536, 101376, 232448])
@pytest.mark.parametrize("element_size", [2, 4, 8])
@pytest.mark.parametrize("width", [1, 33, 512, 1024, 4096, 7168, 16384, 32768])
def test_configs_fit_every_card(op, width, element_size, limit):
    """the tiles in flight fit into the shared memory; a tile covers the row and its warps the tile."""
    configs = importlib.import_module(op("rms_norm").__package__ + ".configs")
    backward = configs.choose_backward_config(width, element_size, limit - 4096)
    # One stage is no pipeline: the tile then stays in registers.
    assert backward.stages == 1 or backward.stages * 2 * backward.rows * backward.width * element_size <= limit - 4096
    for config in (backward, configs.choose_config(width)):
        assert config.width >= width and 1 <= config.num_warps <= 16 and config.rows * config.width >= 32 * config.num_warps
        assert all(value & (value - 1) == 0 for value in (config.rows, config.width, config.num_warps))


def test_channels_past_int32(dsv4, only):
    only("rms_norm")
    far = torch.empty(3 * 2**30 + 1, dtype=torch.bfloat16, device=DEVICE)
    compact, weight = make((1, 4), torch.bfloat16), make_weight(4, torch.bfloat16)
    expected = dsv4.rms_norm(compact, weight)
    x = far.as_strided((1, 4), (4, 2**30))
    x.copy_(compact)
    assert torch.equal(dsv4.rms_norm(x, weight), expected)
    view = far.as_strided((4,), (2**30,))
    view.copy_(weight)
    assert torch.equal(dsv4.rms_norm(compact, view), expected)


def test_lazily_negated_input(dsv4, only):
    only("rms_norm")
    x = torch.complex(make((4, 8)), make((4, 8), seed=1)).conj().imag
    assert x.is_neg() and torch.equal(dsv4.rms_norm(x), dsv4.rms_norm(x.resolve_neg()))


def test_float64_is_float64_throughout(dsv4, only):
    """eps in fp32 would be off by 1e-9 of the result where the mean square is as small as eps."""
    only("rms_norm")
    x = 1e-3 * make((4, 96), torch.float64, seed=3)[2:]
    weight = make_weight(96, torch.float64)
    assert error(dsv4.rms_norm(x, weight, 1e-6), exact(x, weight, 1e-6)) < 1e-14


def test_frozen_weight_gets_no_gradient(dsv4, only, op, monkeypatch):
    """As with LoRA: dx is right, and nothing is computed for the weight."""
    only("rms_norm")
    x, weight = make((5, 96), seed=2).requires_grad_(), make_weight(96)
    sizes, empty_backward = [], op("rms_norm")._empty_backward

    def spy(*arguments):
        grads = empty_backward(*arguments)
        sizes.append(grads[1].numel())
        return grads

    monkeypatch.setattr(op("rms_norm"), "_empty_backward", spy)
    (frozen,) = torch.autograd.grad(dsv4.rms_norm(x, weight).square().sum(), x)
    assert set(sizes) == {0}
    (trained,) = torch.autograd.grad(dsv4.rms_norm(x, weight.clone().requires_grad_()).square().sum(), x)
    assert torch.equal(frozen, trained) and 96 in sizes


def test_forward_mode_and_batched_gradients(dsv4, only):
    only("rms_norm")
    x = make((3, 8), seed=5)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x carries a forward-mode"):
        dsv4.rms_norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    leaf = x.requires_grad_()
    out, rows = dsv4.rms_norm(leaf), torch.randn(4, 3, 8, device=DEVICE)
    (batched,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True, retain_graph=True)
    for row, grad in zip(rows, batched, strict=True):
        assert torch.equal(grad, torch.autograd.grad(out, leaf, row, retain_graph=True)[0])
