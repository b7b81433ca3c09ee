"""Partial interleaved rotary embedding: every backend against float64, gradients, layouts, bad input."""

import importlib

import pytest
import torch
from cases import DTYPES, ROPE, RopeCase, layouts, poison, rope_tables
from compare import assert_no_further, error
from conftest import DEVICE


def theirs(x, cos, sin, unsqueeze_dim=1, inverse=False):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, cos, -sin if inverse else sin, unsqueeze_dim)


def exact(x, cos, sin, unsqueeze_dim=1, inverse=False):
    """float64, as the paper has it: adjacent channels are a complex number, turned by exp(i angle)."""
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double()).unsqueeze(unsqueeze_dim)
    x = x.double()
    nope = x.shape[-1] - 2 * turn.shape[-1]
    turned = torch.complex(x[..., nope::2], x[..., nope + 1 :: 2]) * turn
    return torch.cat((x[..., :nope], torch.stack((turned.real, turned.imag), -1).flatten(-2)), -1)


def make(case, dtype=torch.float32, unsqueeze_dim=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.batch, case.heads, case.tokens, case.width, generator=generator).to(DEVICE, dtype)
    return x if unsqueeze_dim == 1 else x.transpose(1, 2)


SMALL = RopeCase("small", batch=2, heads=3, tokens=5, width=24, pairs=4)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE, ids=str)
def test_forward(dsv4, only, case, dtype, unsqueeze_dim, inverse):
    only("rope")
    x = make(case, dtype, unsqueeze_dim)
    cos, sin = rope_tables(case, DEVICE)
    poison(DEVICE, x.numel() * x.element_size())
    out = dsv4.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim, inverse=inverse)
    assert out.is_contiguous() and out.data_ptr() != x.data_ptr() or x.numel() == 0
    assert_no_further(
        out, theirs(x, cos, sin, unsqueeze_dim, inverse), exact(x, cos, sin, unsqueeze_dim, inverse)
    )
    nope = case.width - 2 * case.pairs
    assert torch.equal(out[..., :nope], x[..., :nope]), "leading channels changed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE, ids=str)
def test_in_place_equals_fresh(dsv4, only, case, dtype):
    only("rope")
    cos, sin = rope_tables(case, DEVICE, batch=case.batch)
    for name, x in layouts(make(case, dtype)):
        expected = dsv4.apply_rotary_pos_emb(x, cos, sin)
        assert dsv4.apply_rotary_pos_emb_(x, cos, sin) is x
        assert torch.equal(x, expected), name


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [ROPE[0], ROPE[5], SMALL], ids=str)
def test_any_layout(dsv4, only, case, dtype, unsqueeze_dim):
    only("rope")
    cos, sin = rope_tables(case, DEVICE)
    plain = make(case, dtype, unsqueeze_dim)
    expected = dsv4.apply_rotary_pos_emb(plain.contiguous(), cos, sin, unsqueeze_dim)
    for name, x in layouts(plain):
        assert torch.equal(dsv4.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim), expected), name
    for (name, cos_view), (_, sin_view) in zip(layouts(cos), layouts(sin)):
        assert torch.equal(dsv4.apply_rotary_pos_emb(plain, cos_view, sin_view, unsqueeze_dim), expected), name


def test_memory_around_strided_input_is_untouched(dsv4, only):
    only("rope")
    cos, sin = rope_tables(SMALL, DEVICE)
    buffer = torch.full((2, 3, 5, 40), float("nan"), device=DEVICE)
    x = buffer[..., 8:32]
    x.copy_(make(SMALL))
    dsv4.apply_rotary_pos_emb_(x, cos, sin)
    assert x.isfinite().all() and buffer[..., :8].isnan().all() and buffer[..., 32:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tables_of_every_dtype(dsv4, only, dtype):
    """A table is used with the precision it has: fp32 angles keep it, bf16 ones give transformers' result."""
    only("rope")
    x = make(SMALL)
    cos, sin = rope_tables(SMALL, DEVICE, dtype)
    assert_no_further(dsv4.apply_rotary_pos_emb(x, cos, sin), theirs(x, cos, sin), exact(x, cos, sin))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_tables_per_batch_and_broadcast(dsv4, only, unsqueeze_dim):
    """positions of row 1 are not those of row 0, and [1, T, P] serves every row."""
    only("rope")
    case = RopeCase("b16", batch=2, heads=3, tokens=5, width=32, pairs=4)
    x = make(case, unsqueeze_dim=unsqueeze_dim)
    position = torch.tensor([[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]], dtype=torch.float64)
    angle = position[..., None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    cos, sin = angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE)
    out = dsv4.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim)
    assert_no_further(out, theirs(x, cos, sin, unsqueeze_dim), exact(x, cos, sin, unsqueeze_dim))
    shared = dsv4.apply_rotary_pos_emb(x, cos[:1], sin[:1], unsqueeze_dim)
    assert torch.equal(shared[0], out[0])
    assert error(shared[1], out[1]) > 0.1, "row 1 must not be turned by row 0's angles"
    one_token = dsv4.apply_rotary_pos_emb(x, cos[:, :1], sin[:, :1], unsqueeze_dim)
    expanded = dsv4.apply_rotary_pos_emb(
        x, cos[:, :1].expand(-1, 5, -1).contiguous(), sin[:, :1].expand(-1, 5, -1).contiguous(), unsqueeze_dim
    )
    assert torch.equal(one_token, expanded)


def test_pairs_are_adjacent_and_trailing(dsv4, only):
    """channel 24 + j holds energy only in itself and in 24 + (j ^ 1)."""
    only("rope")
    angle = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    cos, sin = angle.cos().float().view(1, 1, 4).to(DEVICE), angle.sin().float().view(1, 1, 4).to(DEVICE)
    for j in range(8):
        x = torch.zeros(1, 1, 1, 32, device=DEVICE)
        x[..., 24 + j] = 1
        out = dsv4.apply_rotary_pos_emb(x, cos, sin).flatten().cpu()
        c, s = float(cos[..., j // 2]), float(sin[..., j // 2])
        expected = torch.zeros(32)
        expected[24 + j], expected[24 + (j ^ 1)] = c, s if j % 2 == 0 else -s
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-7)


def test_inverse_undoes(dsv4, only):
    only("rope")
    case = ROPE[0]
    x, (cos, sin) = make(case, torch.float64), rope_tables(case, DEVICE, torch.float64)
    there = dsv4.apply_rotary_pos_emb(x, cos, sin)
    assert error(there, x) > 0.1
    assert error(dsv4.apply_rotary_pos_emb(there, cos, sin, inverse=True), x) < 1e-14


def test_nan_stays_in_its_pair(dsv4, only):
    only("rope")
    x, (cos, sin) = make(SMALL), rope_tables(SMALL, DEVICE)
    x[0, 0, 0, 1] = float("nan")
    x[1, 2, 4, 20] = float("inf")
    bad = ~dsv4.apply_rotary_pos_emb(x, cos, sin).isfinite()
    expected = torch.zeros_like(bad)
    expected[0, 0, 0, 1] = expected[1, 2, 4, 20] = expected[1, 2, 4, 21] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in_place"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [ROPE[0], ROPE[5], ROPE[8]], ids=str)
def test_backward(dsv4, only, case, dtype, unsqueeze_dim, in_place):
    only("rope")
    cos, sin = rope_tables(case, DEVICE, batch=case.batch)
    plain = make(case, dtype, unsqueeze_dim)
    dout = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    for name, cotangent in layouts(dout):
        grads = []
        for function in (dsv4.apply_rotary_pos_emb_ if in_place else dsv4.apply_rotary_pos_emb, theirs, exact):
            leaf = plain.detach().to(torch.float64 if function is exact else dtype).requires_grad_()
            # `* 1` because a leaf can't be rotated in place; a tensor in the model is never one.
            out = function(leaf * 1, cos, sin, unsqueeze_dim)
            grads += torch.autograd.grad(out, leaf, cotangent.to(out.dtype))
        assert_no_further(*grads)


def test_gradient_keeps_the_memory_order_of_x(dsv4, only):
    """The model's q is a transposed view: a gradient in its order needs no copy before the projection's GEMM."""
    only("rope")
    q = make(SMALL).transpose(1, 2).contiguous().requires_grad_()
    cos, sin = rope_tables(SMALL, DEVICE)
    (grad,) = torch.autograd.grad(dsv4.apply_rotary_pos_emb(q.transpose(1, 2), cos, sin).sum(), q)
    assert grad.is_contiguous()


def test_gradcheck(dsv4, only):
    only("rope")
    case = RopeCase("tiny", batch=2, heads=2, tokens=2, width=7, pairs=2)
    x = make(case, torch.float64).requires_grad_()
    cos, sin = rope_tables(case, DEVICE, torch.float64)
    assert torch.autograd.gradcheck(lambda x: dsv4.apply_rotary_pos_emb(x, cos, sin), x)
    assert torch.autograd.gradgradcheck(lambda x: dsv4.apply_rotary_pos_emb(x, cos, sin), x)
    assert torch.autograd.gradcheck(lambda x: dsv4.apply_rotary_pos_emb_(x * 1, cos, sin, inverse=True), x)


def test_backward_saves_tables_only(dsv4, only):
    only("rope")
    x, (cos, sin) = make(SMALL).requires_grad_(), rope_tables(SMALL, DEVICE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda t: t):
        dsv4.apply_rotary_pos_emb(x, cos, sin)
    assert saved == [cos.shape, sin.shape]


def test_no_gradient_for_tables(dsv4, only):
    only("rope")
    x, (cos, sin) = make(SMALL).requires_grad_(), rope_tables(SMALL, DEVICE)
    cos.requires_grad_()
    dsv4.apply_rotary_pos_emb(x, cos, sin).sum().backward()
    assert cos.grad is None and x.grad is not None


def test_repeated_calls_give_the_same_bits(dsv4, only):
    only("rope")
    x, (cos, sin) = make(ROPE[0], torch.bfloat16), rope_tables(ROPE[0], DEVICE)
    first = dsv4.apply_rotary_pos_emb(x, cos, sin)
    for _ in range(3):
        poison(DEVICE, x.numel() * 2)
        assert torch.equal(dsv4.apply_rotary_pos_emb(x, cos, sin), first)


BAD = {
    "cos too wide": (dict(cos=(1, 5, 13), sin=(1, 5, 13)), ValueError, r"cos and sin hold 13 pairs.*24 channels"),
    "no pairs": (dict(cos=(1, 5, 0), sin=(1, 5, 0)), ValueError, "cos and sin hold 0 pairs"),
    "cos and sin differ": (dict(sin=(1, 5, 3)), ValueError, r"cos and sin must be .*\(1, 5, 4\) and \(1, 5, 3\)"),
    "cos per head": (dict(cos=(1, 3, 5, 4), sin=(1, 3, 5, 4)), ValueError, r"cos and sin must be \[B or 1, T or 1, P\]"),
    "wrong tokens": (dict(cos=(1, 4, 4), sin=(1, 4, 4)), ValueError, r"don't broadcast to \[2, 5, P\]"),
    "wrong batch": (dict(cos=(3, 5, 4), sin=(3, 5, 4)), ValueError, r"don't broadcast to \[2, 5, P\]"),
    "integer x": (dict(x=torch.int32), TypeError, "x must be float16, bfloat16, float32 or float64, got torch.int32"),
    "integer cos": (dict(cos=torch.int64), TypeError, "cos must be float16.*got torch.int64"),
    "bool sin": (dict(sin=torch.bool), TypeError, "sin must be float16.*got torch.bool"),
    "dtypes of the tables": (dict(sin=torch.bfloat16), TypeError, "cos is torch.float32 and sin is torch.bfloat16"),
    "no tensor": (dict(cos=1.0), TypeError, "cos must be a torch.Tensor, got float"),
    "another device": (dict(cos="meta"), ValueError, "cos is on meta and x is on"),
    "unsqueeze_dim 0": (dict(unsqueeze_dim=0), ValueError, r"unsqueeze_dim must be 1 .* or 2 .*got 0"),
    "unsqueeze_dim True": (dict(unsqueeze_dim=True), ValueError, "unsqueeze_dim must be 1.*got True"),
    "unsqueeze_dim 1.0": (dict(unsqueeze_dim=1.0), ValueError, "unsqueeze_dim must be 1.*got 1.0"),
    "unsqueeze_dim list": (dict(unsqueeze_dim=[1]), ValueError, r"unsqueeze_dim must be 1.*got \[1\]"),
    "inverse as text": (dict(inverse="no"), TypeError, "inverse must be True or False, got 'no'"),
    "sparse x": (dict(x="sparse"), TypeError, "x must be a dense tensor, got torch.sparse_coo"),
    "unsqueeze_dim -2": (dict(unsqueeze_dim=-2), ValueError, "unsqueeze_dim must be 1"),
    "three dimensions": (dict(x=(3, 5, 24)), ValueError, r"x must have 4 dimensions, got shape \(3, 5, 24\)"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", ["apply_rotary_pos_emb", "apply_rotary_pos_emb_"])
def test_bad_input(dsv4, function, name):
    changes, error_type, message = BAD[name]
    x, (cos, sin) = make(SMALL), rope_tables(SMALL, DEVICE)
    arguments = dict(x=x, cos=cos, sin=sin, unsqueeze_dim=1)
    for key, change in changes.items():
        old = arguments.get(key)
        if isinstance(change, tuple):
            arguments[key] = torch.ones(change, device=DEVICE)
        elif change == "sparse":
            arguments[key] = old.to_sparse()
        elif isinstance(old, torch.Tensor) and isinstance(change, (torch.dtype, str)):
            arguments[key] = old.to(change)
        else:
            arguments[key] = change
    before = arguments["x"].clone()
    for requires_grad in (False, True):
        if requires_grad and arguments["x"].is_floating_point():
            arguments["x"] = (arguments["x"].requires_grad_() * 1)
        with pytest.raises(error_type, match=message):
            getattr(dsv4, function)(**arguments)
    after = arguments["x"].detach()
    assert torch.equal(*((t.to_dense() for t in (after, before)))), "x was changed by a call that failed"
    # What failed is not remembered for a call that is right.
    good = make(SMALL), *rope_tables(SMALL, DEVICE)
    assert torch.equal(getattr(dsv4, function)(*good), dsv4.apply_rotary_pos_emb(make(SMALL), *good[1:]))


def test_bad_input_in_place(dsv4):
    cos, sin = rope_tables(SMALL, DEVICE)
    with pytest.raises(ValueError, match=r"x may overlap itself \(strides .* can't be rotated in place"):
        dsv4.apply_rotary_pos_emb_(torch.ones(1, 3, 5, 24, device=DEVICE).expand(2, 3, 5, 24), cos, sin)
    windows = torch.ones(200, device=DEVICE).as_strided((1, 3, 5, 24), (200, 60, 12, 1))
    with pytest.raises(ValueError, match="may overlap itself"):
        dsv4.apply_rotary_pos_emb_(windows, cos, sin)
    with pytest.raises(ValueError, match="x is a leaf that requires grad"):
        dsv4.apply_rotary_pos_emb_(make(SMALL).requires_grad_(), cos, sin)
    x = make(SMALL)
    with pytest.raises(ValueError, match="cos may share memory with x"):
        dsv4.apply_rotary_pos_emb_(x, x[:1, 0, :, :4], sin)
    assert torch.equal(x, make(SMALL))


def test_no_backend_says_every_reason(dsv4, op):
    x, (cos, sin) = make(SMALL), rope_tables(SMALL, DEVICE)
    backends = op("rope").BACKENDS
    with pytest.raises(NotImplementedError) as caught:
        backends.choose(x.to("meta"), cos.to("meta"), sin.to("meta"))
    message = str(caught.value)
    assert "no backend of rope covers this call" in message
    assert "triton: the tensors are on meta" in message
    assert "reference: the reference serves CPU tensors only" in message


def test_offsets_past_int32(dsv4, only):
    """batch strides below 2^31 whose product with the batch index is not."""
    only("rope")
    stride = 2**30 + 64
    buffer = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    x = buffer.as_strided((3, 1, 2, 32), (stride, 32, 32, 1))
    case = RopeCase("far", batch=3, heads=1, tokens=2, width=32, pairs=4)
    compact = make(case, torch.bfloat16)
    x.copy_(compact)
    cos, sin = rope_tables(case, DEVICE)
    expected = dsv4.apply_rotary_pos_emb(compact, cos, sin)
    assert torch.equal(dsv4.apply_rotary_pos_emb(x, cos, sin), expected)
    dsv4.apply_rotary_pos_emb_(x, cos, sin)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("element_size", [2, 4, 8])
@pytest.mark.parametrize("channels", [2, 3, 45, 64, 512, 576])
@pytest.mark.parametrize("heads", [1, 5, 64, 128])
def test_config_covers_the_row(op, heads, channels, element_size):
    config = importlib.import_module(op("rope").__package__ + ".configs").choose_config(heads, channels, element_size)
    assert 2 * config.pairs >= channels
    assert all(value & (value - 1) == 0 for value in (config.tokens, config.heads, config.pairs, config.num_warps))
    assert config.heads < 2 * heads and config.tokens * config.heads * 2 * config.pairs * element_size <= 8192


def test_channels_past_int32(dsv4, only):
    """Channels of x and of the tables 2^30 elements apart: the product with the channel is past 2^31."""
    only("rope")
    far = torch.empty(7 * 2**29 + 8, dtype=torch.bfloat16, device=DEVICE)
    case = RopeCase("wide", batch=1, heads=1, tokens=1, width=8, pairs=4)
    compact, (cos, sin) = make(case, torch.bfloat16), rope_tables(case, DEVICE, torch.bfloat16)
    expected = dsv4.apply_rotary_pos_emb(compact, cos, sin)
    x = far.as_strided((1, 1, 1, 8), (8, 8, 8, 2**29))
    x.copy_(compact)
    assert torch.equal(dsv4.apply_rotary_pos_emb(x, cos, sin), expected)
    dsv4.apply_rotary_pos_emb_(x, cos, sin)
    assert torch.equal(x, expected)
    table = far[1:].as_strided((1, 1, 4), (0, 0, 2**30))
    table.copy_(cos)
    assert torch.equal(dsv4.apply_rotary_pos_emb(compact, table, sin), expected)


def test_lazily_negated_tables(dsv4, only):
    """`freqs.conj().imag` is a view of the positive numbers with a negative bit."""
    only("rope")
    x, (cos, sin) = make(SMALL), rope_tables(SMALL, DEVICE)
    conjugate = torch.complex(cos, sin).conj()
    assert conjugate.imag.is_neg()
    expected = dsv4.apply_rotary_pos_emb(x, cos, sin, inverse=True)
    assert torch.equal(dsv4.apply_rotary_pos_emb(x, conjugate.real, conjugate.imag), expected)
    assert torch.equal(dsv4.apply_rotary_pos_emb_(x.clone(), conjugate.real, conjugate.imag), expected)
    with pytest.raises(ValueError, match="x is a lazily negated view"):
        dsv4.apply_rotary_pos_emb_(torch.complex(x, x).conj().imag, cos, sin)


def test_in_place_is_seen_by_autograd(dsv4, only):
    """A tensor that was saved for a backward and then rotated: an error, no wrong gradient."""
    only("rope")
    cos, sin = rope_tables(SMALL, DEVICE)
    weight, x = torch.ones(2, 3, 5, 24, device=DEVICE, requires_grad=True), make(SMALL)
    product = (weight * x).sum()
    dsv4.apply_rotary_pos_emb_(x, cos, sin)
    assert x._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        inference = make(SMALL) * 1
        dsv4.apply_rotary_pos_emb_(inference, cos, sin)
    with pytest.raises(ValueError, match="x was made in inference mode"):
        dsv4.apply_rotary_pos_emb_(inference, cos, sin)


def test_forward_mode_and_batched_gradients(dsv4, only):
    only("rope")
    x, (cos, sin) = make(SMALL), rope_tables(SMALL, DEVICE)
    for function in (dsv4.apply_rotary_pos_emb, dsv4.apply_rotary_pos_emb_):
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x carries a forward-mode"):
            function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), cos, sin)
    leaf = x.requires_grad_()
    out = dsv4.apply_rotary_pos_emb(leaf, cos, sin)
    rows = torch.randn(3, *out.shape, device=DEVICE)
    (batched,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True, retain_graph=True)
    for row, grad in zip(rows, batched, strict=True):
        assert torch.equal(grad, torch.autograd.grad(out, leaf, row, retain_graph=True)[0])
