"""Hadamard transform: every backend against the matrix product in float64, gradients, layouts, bad input."""

import importlib
import sys

import pytest
import torch
from cases import DTYPES, layouts, poison
from compare import assert_no_further, error
from conftest import DEVICE
from torch._dynamo.testing import CompileCounter

# Widths: the indexer's 128, both ends, and the first that crosses warps; one row, odd rows, none.
SHAPES = ((5, 128), (2, 3, 64), (3, 4096), (17, 2048), (2, 3, 4, 32), (64,), (7, 1), (3, 2), (1, 1024), (0, 128), (2, 0, 16))


@pytest.fixture
def transform(op):
    return op("hadamard").hadamard_transform


def matrix(width, dtype=torch.float64):
    """The Sylvester construction, as in scipy.linalg.hadamard."""
    h = torch.ones(1, 1, dtype=dtype)
    while len(h) < width:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h.to(DEVICE)


def make(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(x, scale=1.0):
    return x.double() @ matrix(x.shape[-1]) * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(transform, only, shape, dtype):
    only("hadamard")
    x, scale = make(shape, dtype), shape[-1] ** -0.5
    poison(DEVICE, x.numel() * x.element_size())
    out = transform(x, scale)
    # The official code's way: sums in fp32, rounded once. In fp64 that is the oracle itself.
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    assert_no_further(out, (x.to(acc) @ matrix(shape[-1], acc) * scale).to(dtype), exact(x, scale))
    if dtype == torch.float64:
        assert error(out, exact(x, scale)) < 1e-14  # the scale is not rounded to fp32 on its way


@pytest.mark.parametrize("width", [1 << power for power in range(13)])
def test_whole_numbers_are_exact(transform, only, width):
    """Each entry of H, its order and its sign: nothing is rounded here."""
    only("hadamard")
    x = torch.randint(-50, 51, (3, width), generator=torch.Generator().manual_seed(width)).to(DEVICE, torch.float32)
    assert torch.equal(transform(x), exact(x).float())
    assert torch.equal(transform(transform(x), 1 / width), x)
    if width <= 128:
        assert torch.equal(transform(torch.eye(width, device=DEVICE)), matrix(width).float())


@pytest.mark.parametrize("width", [64, 128, 4096])
def test_one_rounding(transform, only, width):
    """bf16 and fp16 results are the correctly rounded ones but for fp32 noise; sums past fp16's range are scaled first."""
    only("hadamard")
    for dtype in (torch.bfloat16, torch.float16):
        x = make((4, width), dtype)
        assert (transform(x, width**-0.5) != exact(x, width**-0.5).to(dtype)).float().mean() < 2e-3
    large = torch.full((1, width), 6e4, dtype=torch.float16, device=DEVICE)
    assert torch.equal(transform(large, 1 / width), exact(large, 1 / width).half())


def test_backends_agree_bit_for_bit(transform, op, only):
    only("hadamard")
    reference = importlib.import_module(op("hadamard").__package__ + ".reference")
    for dtype in DTYPES:
        x = make((3, 256), dtype)
        assert torch.equal(transform(x, 0.0625).cpu(), reference.hadamard_transform(x.cpu(), 0.0625))


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (2, 7, 32), (5, 256)], ids=str)
def test_any_layout(transform, only, shape):
    only("hadamard")
    plain = make(shape, torch.bfloat16)
    expected = transform(plain, 0.125)
    for name, x in layouts(plain):
        assert torch.equal(transform(x, 0.125), expected), name
    broadcast = plain[..., :1, :].expand(shape)
    assert torch.equal(transform(broadcast, 0.125), transform(broadcast.contiguous(), 0.125))


def test_transposed_heads_keep_their_memory_order(transform, only):
    only("hadamard")
    q = make((2, 5, 3, 64)).transpose(1, 2)
    assert transform(q).stride() == q.stride()


def test_many_strided_dimensions(transform, only):
    backend = only("hadamard")
    x = make((3, 3, 3, 3, 3, 16))[::2, ::2, ::2, ::2, ::2]
    if backend == "reference":
        assert error(transform(x), exact(x)) < 1e-6
    else:
        with pytest.raises(NotImplementedError, match=r"triton: the leading dimensions \(strides .* don't merge into 3"):
            transform(x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_stays_alone(transform, only, bad):
    only("hadamard")
    x = make((40, 64), torch.bfloat16)
    expected = transform(x)
    x[7, 5] = bad
    out = transform(x)
    assert not out[7].isfinite().any()
    out[7] = expected[7]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 4, 32), (1, 4096), (2, 0, 64), (64,)], ids=str)
def test_backward(transform, only, shape, dtype):
    only("hadamard")
    x, dout = make(shape, dtype, seed=1).requires_grad_(), make(shape, dtype, seed=2)
    poison(DEVICE, x.numel() * x.element_size())
    (dx,) = torch.autograd.grad(transform(x, 0.25), x, dout)
    assert dx.dtype == dtype and torch.equal(dx, transform(dout, 0.25))
    assert error(dx, exact(dout, 0.25)) < {2: 2**-7, 4: 1e-6, 8: 1e-14}[x.element_size()]


def test_backward_any_layout(transform, only):
    only("hadamard")
    plain, dout = make((2, 3, 5, 32), seed=4), make((2, 3, 5, 32), seed=5)
    for name, x in layouts(plain):
        for other, cotangent in layouts(dout):
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(transform(x, 2.0), x, cotangent)
            assert torch.equal(dx, transform(dout, 2.0)), (name, other)


def test_gradcheck(transform, only):
    only("hadamard")
    x = make((3, 2, 8), torch.float64, seed=3)[1:].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: transform(x, 0.3), x)
    assert torch.autograd.gradgradcheck(lambda x: transform(x, 0.3), x)
    (grad,) = torch.autograd.grad(transform(x, 0.3).pow(3).sum(), x, create_graph=True)
    assert grad.requires_grad


def test_repeated_runs_are_equal(transform, only):
    only("hadamard")
    x = make((33, 128), torch.bfloat16)
    runs = [transform(x, 128**-0.5) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    # A row's result depends on the row alone.
    assert torch.equal(transform(x[11:12], 128**-0.5), runs[0][11:12])


def test_offsets_past_int32(transform, only):
    """row strides below 2^31 whose product with the row is not."""
    backend = only("hadamard")
    if DEVICE == "cpu" and backend == "triton":
        pytest.skip("the interpreter copies the whole storage; the GPU and the reference run this")
    stride = 2**30 + 64
    x = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 64), (stride, 1))
    compact = make((3, 64), torch.bfloat16)
    x.copy_(compact)
    assert torch.equal(transform(x), transform(compact))


BAD = {
    "not a power of two": (dict(x=(3, 96)), ValueError, "x's last dimension must be a power of two from 1 to 4096, got 96"),
    "too long": (dict(x=(1, 8192)), ValueError, "power of two from 1 to 4096, got 8192"),
    "empty rows": (dict(x=(3, 0)), ValueError, "power of two from 1 to 4096, got 0"),
    "scalar": (dict(x=()), ValueError, "x must have at least one dimension"),
    "integers": (dict(x=torch.int32), TypeError, "x must be float16, bfloat16, float32 or float64, got torch.int32"),
    "complex": (dict(x=torch.complex64), TypeError, "x must be float16.*got torch.complex64"),
    "no tensor": (dict(x=[1.0, 2.0]), TypeError, "x must be a torch.Tensor, got list"),
    "tensor scale": (dict(scale=torch.ones(())), TypeError, "scale must be a number, got Tensor"),
    "no scale": (dict(scale=None), TypeError, "scale must be a number, got NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(transform, name):
    changes, error_type, message = BAD[name]
    arguments = dict(x=make((3, 64)), scale=1.0)
    for key, change in changes.items():
        if isinstance(change, tuple):
            arguments[key] = torch.ones(change, device=DEVICE)
        else:
            arguments[key] = arguments[key].to(change) if isinstance(change, torch.dtype) else change
    with pytest.raises(error_type, match=message):
        transform(**arguments)


def test_opcheck(op, only):
    only("hadamard")
    registered = op("hadamard").ops.hadamard_transform.default
    torch.library.opcheck(registered, (make((2, 5, 3, 16)).transpose(1, 2).detach().requires_grad_(), 0.25))
    torch.library.opcheck(registered, (make((4, 64), torch.bfloat16), 1.0))


def test_meta_tensors_give_meta_results(transform):
    x = make((2, 5, 3, 16)).transpose(1, 2)
    out = transform(x.to("meta"))
    assert out.is_meta and out.shape == x.shape and out.stride() == transform(x).stride()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_fullgraph(transform, train):
    x = make((2, 5, 3, 16)).transpose(1, 2).detach().requires_grad_(train)
    compiled = torch.compile(lambda x: transform(x, 0.25), fullgraph=True, backend="aot_eager")
    expected, got = transform(x, 0.25), compiled(x)
    assert torch.equal(expected, got) and expected.stride() == got.stride()
    if train:
        assert torch.equal(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, got)))


def test_no_recompile_per_row_count(transform):
    counter = CompileCounter()
    compiled = torch.compile(lambda x: transform(x, 0.25), fullgraph=True, backend=counter)
    for rows in (7, 5, 2, 3, 16, 64, 33, 100, 1):
        x = make((2, rows, 32))
        assert torch.equal(compiled(x), transform(x, 0.25))
    assert counter.frame_count <= 3, counter.frame_count


@pytest.mark.parametrize("width", [1 << power for power in range(13)])
def test_config_covers_the_tile(op, width):
    configs = sys.modules[op("hadamard").__package__ + ".configs"]
    config = configs.choose_config(width)
    assert config.rows * width >= 2048 and config.rows * width == 2048 * config.num_warps
