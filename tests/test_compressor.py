"""Compressed entries: the definition against transformers' modules, every backend against float64, state, bad input."""

import importlib
from dataclasses import dataclass

import pytest
import torch
from cases import DTYPES, layouts, poison
from compare import assert_no_further, error
from conftest import DEVICE
from tiny import tiny_config, tiny_model
from torch._dynamo.testing import CompileCounter

@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    windows: int
    rate: int
    overlap: bool
    width: int
    pairs: int
    previous: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("csa", batch=2, windows=3, rate=4, overlap=True, width=512, pairs=32),
    Case("csa_later", batch=2, windows=3, rate=4, overlap=True, width=512, pairs=32, previous=True),
    Case("indexer_later", batch=3, windows=5, rate=4, overlap=True, width=128, pairs=32, previous=True),
    Case("hca", batch=1, windows=2, rate=128, overlap=False, width=512, pairs=32),
    Case("hca_small", batch=2, windows=3, rate=8, overlap=False, width=32, pairs=4),
    Case("odd_csa", batch=2, windows=3, rate=3, overlap=True, width=96, pairs=11, previous=True),
    Case("odd_hca", batch=2, windows=2, rate=129, overlap=False, width=200, pairs=100),
    Case("two_channels", batch=1, windows=4, rate=1, overlap=True, width=2, pairs=1, previous=True),
    Case("one_token", batch=2, windows=3, rate=1, overlap=False, width=6, pairs=1),
    Case("decode", batch=3, windows=1, rate=4, overlap=True, width=32, pairs=4, previous=True),
    Case("no_windows", batch=2, windows=0, rate=4, overlap=True, width=32, pairs=4, previous=True),
    Case("no_batch", batch=0, windows=2, rate=8, overlap=False, width=32, pairs=4),
)
CSA, HCA = CASES[2], CASES[4]
NAMES = ("kv", "gate", "position_bias", "norm_weight", "cos", "sin", "previous_kv", "previous_gate")


@pytest.fixture
def compress_kv(op):
    return op("compressor").compress_kv


def make(case, dtype=torch.float32, bias_dtype=torch.float32, seed=0):
    """Arguments by name: fp32 bias and norm weight as in the model, angles of window starts up to a million."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    channels = case.width * (1 + case.overlap)
    tokens = case.windows * case.rate
    position = torch.randint(0, 250_000, (case.batch, case.windows, 1), generator=generator).double() * case.rate
    angle = position * 160000.0 ** (-torch.arange(case.pairs, dtype=torch.float64) / case.pairs)
    arguments = dict(
        kv=randn(case.batch, tokens, channels).to(dtype),
        gate=2 * randn(case.batch, tokens, channels).to(dtype),
        position_bias=randn(case.rate, channels).to(bias_dtype),
        norm_weight=1 + 0.3 * randn(case.width).to(bias_dtype),
        cos=angle.cos().to(dtype),
        sin=angle.sin().to(dtype),
        previous_kv=randn(case.batch, case.rate, case.width).to(dtype) if case.previous else None,
        previous_gate=2 * randn(case.batch, case.rate, case.width) if case.previous else None,
    )
    arguments = {name: None if x is None else x.to(DEVICE) for name, x in arguments.items()}
    return arguments | dict(rate=case.rate, overlap=case.overlap, eps=1e-6)


def theirs(kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, rate, overlap, eps):
    """transformers' lines, of DeepseekV4CSACompressor or DeepseekV4HCACompressor."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    batch, tokens, _ = kv.shape
    n_windows, head_dim = tokens // rate, norm_weight.shape[0]
    if n_windows == 0 or batch == 0:  # kept in the graph: gradients are zeros
        zero = sum(x.sum() for x in (kv, gate, position_bias, norm_weight, previous_kv, previous_gate) if x is not None) * 0
        return kv.new_zeros((batch, n_windows, head_dim)) + zero.to(kv.dtype)
    chunk_kv = kv.view(batch, n_windows, rate, -1)
    chunk_gate = gate.view(batch, n_windows, rate, -1) + position_bias
    if overlap:
        new_kv = chunk_kv.new_zeros((batch, n_windows, 2 * rate, head_dim))
        new_gate = chunk_gate.new_full((batch, n_windows, 2 * rate, head_dim), float("-inf"))
        new_kv[:, :, rate:] = chunk_kv[..., head_dim:]
        new_gate[:, :, rate:] = chunk_gate[..., head_dim:]
        if n_windows > 1:
            new_kv[:, 1:, :rate] = chunk_kv[:, :-1, :, :head_dim]
            new_gate[:, 1:, :rate] = chunk_gate[:, :-1, :, :head_dim]
        if previous_kv is not None:
            new_kv[:, 0, :rate] = previous_kv.to(new_kv.dtype)
            new_gate[:, 0, :rate] = previous_gate.to(new_gate.dtype)
        chunk_kv, chunk_gate = new_kv, new_gate
    hidden = (chunk_kv * chunk_gate.softmax(dim=2, dtype=torch.float32).to(chunk_kv.dtype)).sum(dim=2)
    x = hidden.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    compressed = (norm_weight * x).to(hidden.dtype)
    return apply_rotary_pos_emb(compressed.unsqueeze(1), cos, sin).squeeze(1)


def exact(kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate, rate, overlap, eps):
    """float64, window by window, as the paper has it."""
    tensors = (kv, gate, position_bias, norm_weight, cos, sin, previous_kv, previous_gate)
    kv, gate, bias, weight, cos, sin, previous_kv, previous_gate = (None if x is None else x.double() for x in tensors)
    width, entries = weight.shape[0], []
    for window in range(kv.shape[1] // rate):
        here = slice(window * rate, (window + 1) * rate)
        values, logits = kv[:, here, -width:], gate[:, here, -width:] + bias[:, -width:]
        if overlap and window > 0:
            before = slice((window - 1) * rate, window * rate)
            values = torch.cat((kv[:, before, :width], values), 1)
            logits = torch.cat((gate[:, before, :width] + bias[:, :width], logits), 1)
        elif previous_kv is not None:
            values, logits = torch.cat((previous_kv, values), 1), torch.cat((previous_gate, logits), 1)
        pooled = (logits.softmax(1) * values).sum(1)
        entry = weight * pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
        turn, nope = torch.complex(cos[:, window], sin[:, window]), width - 2 * cos.shape[-1]
        turned = torch.complex(entry[:, nope::2], entry[:, nope + 1 :: 2]) * turn
        entries.append(torch.cat((entry[:, :nope], torch.stack((turned.real, turned.imag), -1).flatten(-2)), -1))
    zero = sum(x.sum() * 0 for x in (kv, gate, bias, weight, previous_kv, previous_gate) if x is not None)
    return torch.stack(entries, 1) + zero if entries else kv.new_zeros(kv.shape[0], 0, width) + zero


def double(arguments):
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


# The definition against transformers' modules.


def tiny_compressors(kind):
    """transformers' module and, for CSA, its indexer's compressor, with its name in the cache and the layer's index."""
    layer = 1 if kind == "csa" else 2
    return tiny_model().model.layers[layer].self_attn.compressor, layer


def entries_of(compress_kv, module, hidden, first_window, previous=(None, None), numerics="transformers"):
    """What a layer does: the module's projections of whole windows through compress_kv."""
    rate, overlap = module.compress_rate, module.kv_proj.out_features == 2 * module.head_dim
    usable = hidden.shape[1] // rate * rate
    kv, gate = module.kv_proj(hidden)[:, :usable], module.gate_proj(hidden)[:, :usable]
    positions = ((torch.arange(usable // rate, device=DEVICE) + first_window) * rate)[None]
    cos, sin = module.rotary_emb(hidden, position_ids=positions, layer_type="compress")
    norm = module.kv_norm
    return compress_kv(
        kv, gate, module.position_bias, norm.weight, cos, sin, rate=rate, overlap=overlap, eps=norm.variance_epsilon,
        previous_kv=previous[0], previous_gate=previous[1], numerics=numerics,
    )  # fmt: skip


def hidden_states(tokens, batch=2, seed=0):
    return torch.randn(batch, tokens, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def call(module, hidden, layer, cache=None, start=0):
    q_residual = torch.randn(hidden.shape[0], hidden.shape[1], 16, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    positions = torch.arange(start, start + hidden.shape[1], device=DEVICE)[None]
    return module(hidden, q_residual, positions, cache, layer)


@pytest.mark.transformers_matrix
@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 9, 16, 19])
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_one_shot_equals_the_module(compress_kv, only, kind, tokens):
    """S < rate gives no entry; tokens behind the last whole window don't count."""
    only("compressor")
    module, layer = tiny_compressors(kind)
    with torch.no_grad():
        expected = call(module, hidden_states(tokens), layer)[0].squeeze(1)
        got = entries_of(compress_kv, module, hidden_states(tokens), 0)
    assert got.shape == expected.shape == (2, tokens // module.compress_rate, 32)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.transformers_matrix
@pytest.mark.parametrize("chunks", [(19,), (8, 8, 3), (5, 1, 13), (1,) * 19, (3, 4, 12)], ids=str)
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_any_chunking_equals_the_module(compress_kv, only, kind, chunks):
    """Our layer on transformers' own cache: its state is what compress_kv takes, and entries don't depend on chunks."""
    from transformers import DynamicCache

    only("compressor")
    module, layer = tiny_compressors(kind)
    outer, hidden, start = module, hidden_states(19), 0
    names = {"compressor": module} | ({"indexer": module.indexer} if kind == "csa" else {})
    host_cache, cache = DynamicCache(config=tiny_config()), DynamicCache(config=tiny_config())
    with torch.no_grad():
        one_shot = {name: entries_of(compress_kv, module, hidden, 0) for name, module in names.items()}
        for chunk in hidden.split(chunks, dim=1):
            call(outer, chunk, layer, host_cache, start)
            start += chunk.shape[1]
            for name, module in names.items():
                ours, rate, width = cache.layers[layer], module.compress_rate, module.head_dim
                kv, gate, position = ours.store_compression_weights(name, module.kv_proj(chunk), module.gate_proj(chunk))
                windows, previous = kv.shape[1] // rate, (None, None)
                if kind == "csa" and windows:
                    last = (x[:, -rate:].unflatten(1, (1, rate)) for x in (kv, gate))
                    last_kv, last_gate = (x + bias for x, bias in zip(last, (0, module.position_bias)))
                    previous = ours.update_overlap_state(name, last_kv, last_gate, width)
                positions = (position + torch.arange(windows, device=DEVICE) * rate)[None]
                cos, sin = module.rotary_emb(kv, position_ids=positions, layer_type="compress")
                norm = module.kv_norm
                entries = compress_kv(
                    kv, gate, module.position_bias, norm.weight, cos, sin, rate=rate, overlap=kind == "csa",
                    eps=norm.variance_epsilon, previous_kv=previous[0], previous_gate=previous[1],
                )  # fmt: skip
                ours.update_compressor_states(name, entries)
    for name in names:
        ours, host = cache.layers[layer], host_cache.layers[layer]
        torch.testing.assert_close(ours.compressed_kv[name], host.compressed_kv[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.compressed_kv[name], one_shot[name], rtol=1e-4, atol=1e-5)
        for state in ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")[: 4 if kind == "csa" else 2]:
            torch.testing.assert_close(getattr(ours, state)[name], getattr(host, state)[name])


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_has_the_rounding_points_of_transformers(op, case, dtype, bias_dtype):
    if DEVICE != "cpu":
        pytest.skip("the reference serves CPU tensors only")
    reference, arguments = op("compressor").BACKENDS.modules["reference"], make(case, dtype, bias_dtype)
    assert torch.equal(reference.compress_kv(**arguments, numerics="transformers"), theirs(**arguments))


# Every backend against float64.


@pytest.mark.parametrize("numerics", ["transformers", "official"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(compress_kv, only, case, dtype, numerics):
    only("compressor")
    arguments = make(case, dtype)
    poison(DEVICE, case.batch * case.windows * case.width * arguments["kv"].element_size())
    out = compress_kv(**arguments, numerics=numerics)
    assert out.is_contiguous()
    assert_no_further(out, theirs(**arguments), exact(**arguments))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[5]], ids=str)
def test_numerics_round_where_they_say(compress_kv, only, case):
    """Official results are the correctly rounded ones but for fp32 noise; transformers' are transformers' bits."""
    only("compressor")
    arguments = make(case, torch.bfloat16)
    best = exact(**arguments).bfloat16()
    official, host = (compress_kv(**arguments, numerics=numerics) for numerics in ("official", "transformers"))
    # The rest are near ties, which the last bit of an exp or a sum decides.
    assert (official != best).float().mean() < 5e-3
    assert (host != theirs(**arguments)).float().mean() < 5e-3 < 0.1 < (host != best).float().mean()


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_and_norm_weight_of_other_dtypes(compress_kv, only, bias_dtype):
    """A bf16 bias, as in models that transformers before 5.20 loads, makes a bf16 logit."""
    only("compressor")
    arguments = make(CSA, torch.bfloat16, bias_dtype)
    out, host = compress_kv(**arguments), theirs(**arguments)
    assert_no_further(out, host, exact(**arguments))
    assert (out != host).float().mean() < 5e-3


@pytest.mark.parametrize("numerics", ["transformers", "official"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(compress_kv, only, case, dtype, numerics):
    only("compressor")
    arguments = make(case, dtype)
    shape = (case.batch, case.windows, case.width)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    poison(DEVICE, arguments["kv"].numel() * arguments["kv"].element_size(), 4 * case.width, 4 * dout.numel())

    def ours(**arguments):
        return compress_kv(**arguments, numerics=numerics)

    results = [gradients(*call, dout) for call in ((ours, arguments), (theirs, arguments), (exact, double(arguments)))]
    for name, mine, host, truth in zip(differentiable(arguments), *results, strict=True):
        assert mine.shape == truth.shape and mine.dtype == arguments[name].dtype, name
        if not truth.any():
            assert not mine.any(), name
        elif case.width == 2 and dtype == torch.float32:
            # The norm's gradient of two channels is a difference of two near numbers: fp32 noise decides who is nearer.
            assert error(mine, truth) < 2**-20, name
        else:
            assert_no_further(mine, host, truth)


def differentiable(arguments):
    return [name for name in NAMES if name not in ("cos", "sin") and arguments[name] is not None]


def gradients(function, arguments, dout):
    names = differentiable(arguments)
    arguments = arguments | {name: arguments[name].detach().requires_grad_() for name in names}
    out = function(**arguments)
    return torch.autograd.grad(out, [arguments[name] for name in names], dout.to(out.dtype))


@pytest.mark.parametrize("case", [CSA, HCA, CASES[5]], ids=str)
def test_any_layout(compress_kv, only, case):
    """Among them columns of wider rows, which is how a fused projection gives kv and gate."""
    only("compressor")
    plain = make(case)
    dout = torch.randn(case.batch, case.windows, case.width, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    expected, expected_grads = compress_kv(**plain), gradients(compress_kv, plain, dout)
    for name in NAMES:
        if plain[name] is None:
            continue
        for layout, view in layouts(plain[name]):
            arguments = plain | {name: view}
            assert torch.equal(compress_kv(**arguments), expected), (name, layout)
            for got, want in zip(gradients(compress_kv, arguments, dout), expected_grads, strict=True):
                assert got.is_contiguous()
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=f"{name}, {layout}")
    for layout, view in layouts(dout):
        for got, want in zip(gradients(compress_kv, plain, view), expected_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=f"dout, {layout}")


def test_fused_projection(compress_kv, only):
    """kv and gate are column slices of one tensor, at a token stride of both, and NaN around them is never read."""
    only("compressor")
    arguments = make(CSA)
    tokens, channels = arguments["kv"].shape[1:]
    fused = torch.full((CSA.batch, tokens + 3, 2 * channels + 8), float("nan"), device=DEVICE)
    fused[:, :tokens, :channels], fused[:, :tokens, channels : 2 * channels] = arguments["kv"], arguments["gate"]
    views = dict(kv=fused[:, :tokens, :channels], gate=fused[:, :tokens, channels : 2 * channels])
    assert torch.equal(compress_kv(**arguments | views), compress_kv(**arguments))


# Hostile values and state .


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [32, 512])
def test_huge_gates_and_unused_first_half(compress_kv, only, width, dtype):
    """gates of +-90, biases of +-50, Inf and NaN in a state that holds nothing: finite, and as without state."""
    only("compressor")
    case = Case("first", batch=2, windows=2, rate=4, overlap=True, width=width, pairs=4)
    arguments = make(case, dtype)
    arguments["gate"] = 90 * arguments["gate"].sign()
    arguments["position_bias"] = 50 * arguments["position_bias"].sign()
    expected = compress_kv(**arguments)
    assert expected.isfinite().all()
    assert_no_further(expected, theirs(**arguments), exact(**arguments))
    empty = torch.full((2, 4, width), float("-inf"), device=DEVICE)
    for fill in ("inf", "nan", "-inf", "0"):
        previous_kv = torch.full((2, 4, width), float(fill), dtype=dtype, device=DEVICE)
        arguments |= dict(previous_kv=previous_kv, previous_gate=empty)
        assert torch.equal(compress_kv(**arguments), expected)
        for name, grad in zip(differentiable(arguments), gradients(compress_kv, arguments, torch.ones_like(expected))):
            assert grad.isfinite().all() and not (name.startswith("previous") and grad.any()), name


def test_last_window_first_series_is_unused(compress_kv, only):
    """It belongs to the next call's first entry: Inf there reaches nothing, and its gradient is 0."""
    only("compressor")
    arguments = make(CSA)
    expected = compress_kv(**arguments)
    for name in ("kv", "gate"):
        arguments[name][:, -CSA.rate :, : CSA.width] = float("inf")
    assert torch.equal(compress_kv(**arguments), expected)
    dkv, dgate, *others = gradients(compress_kv, arguments, torch.ones_like(expected))
    assert not dkv[:, -CSA.rate :, : CSA.width].any() and not dgate[:, -CSA.rate :, : CSA.width].any()
    assert all(grad.isfinite().all() for grad in (dkv, dgate, *others))


@pytest.mark.parametrize("case", [CSA, HCA], ids=str)
def test_an_entry_depends_on_its_slots_alone(compress_kv, only, case):
    """Batch rows don't mix, windows don't mix but for the overlap, and a row alone gives the same bits."""
    only("compressor")
    arguments = make(case, torch.bfloat16)
    expected = compress_kv(**arguments)
    for row in range(case.batch):
        per_row = {name for name in NAMES if arguments[name] is not None and arguments[name].dim() == 3}
        alone = {name: x[row : row + 1] if name in per_row else x for name, x in arguments.items()}
        assert torch.equal(compress_kv(**alone), expected[row : row + 1])
    token = case.rate + 1  # in window 1
    for name in ("kv", "gate"):
        changed = arguments[name].clone()
        changed[1, token] = float("nan")
        bad = compress_kv(**arguments | {name: changed}).isnan()
        reached = torch.zeros_like(bad)
        reached[1, 1 : 2 + case.overlap] = True
        # NaN spreads over the entry through the norm.
        assert torch.equal(bad, reached), name


def test_window_start_positions(compress_kv, only):
    """entry w of constant tokens is rope(norm(c), 4 w), so neighbours differ by one angle."""
    only("compressor")
    case = Case("b19", batch=1, windows=4, rate=4, overlap=True, width=32, pairs=16)
    arguments = make(case)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    arguments["kv"] = vector.repeat(2).expand(1, 16, 64).contiguous()
    arguments["gate"] = torch.zeros_like(arguments["kv"])
    arguments["position_bias"] = torch.zeros_like(arguments["position_bias"])
    angle = 4.0 * torch.arange(4, dtype=torch.float64)[:, None] * 160000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    arguments |= dict(cos=angle.cos().float()[None].to(DEVICE), sin=angle.sin().float()[None].to(DEVICE))
    entries = compress_kv(**arguments).double()[0]
    normed = (vector.double() * (vector.double().square().mean() + 1e-6).rsqrt() * arguments["norm_weight"].double()).cpu()
    turned = torch.complex(normed[::2], normed[1::2]) * torch.complex(angle.cos(), angle.sin())
    torch.testing.assert_close(entries.cpu(), torch.view_as_real(turned).flatten(-2), rtol=1e-5, atol=1e-5)
    dots = (entries[1:] * entries[:-1]).sum(-1)
    torch.testing.assert_close(dots, dots[:1].expand(3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [CSA, HCA], ids=str)
@pytest.mark.parametrize("split", [1, 2, 3])
def test_gradients_flow_through_the_state(compress_kv, only, case, split):
    """Two calls with the state between them have the gradients of one."""
    only("compressor")
    case = Case(case.name, case.batch, 4, case.rate, case.overlap, case.width, case.pairs)
    arguments, tokens, width = make(case), split * case.rate, case.width

    def chunked(kv, gate, position_bias, cos, sin, previous_kv, previous_gate, **rest):
        first = compress_kv(kv[:, :tokens], gate[:, :tokens], position_bias, cos=cos[:, :split], sin=sin[:, :split], **rest)
        if case.overlap:
            last = slice(tokens - case.rate, tokens)
            previous_kv, previous_gate = kv[:, last, :width], gate[:, last, :width] + position_bias[:, :width]
        second = compress_kv(
            kv[:, tokens:], gate[:, tokens:], position_bias, cos=cos[:, split:], sin=sin[:, split:],
            previous_kv=previous_kv, previous_gate=previous_gate, **rest,
        )  # fmt: skip
        return torch.cat((first, second), 1)

    assert torch.equal(chunked(**arguments), compress_kv(**arguments))
    dout = torch.randn(case.batch, 4, width, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    for got, want in zip(gradients(chunked, arguments, dout), gradients(compress_kv, arguments, dout), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_repeated_runs_give_the_same_bits(compress_kv, only, case):
    only("compressor")
    arguments = make(case, torch.bfloat16)
    runs = []
    for _ in range(3):
        poison(DEVICE, arguments["kv"].numel() * 2, 4 * case.width * case.rate)
        out = compress_kv(**arguments)
        runs.append((out, *gradients(compress_kv, arguments, torch.ones_like(out))))
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("windows", [1, 65, 66, 67, 133])
def test_bias_and_weight_gradients_of_any_window_count(compress_kv, only, windows):
    """windows split over programs must all be counted, whatever the count."""
    if only("compressor") == "triton" and DEVICE == "cpu" and windows > 67:
        pytest.skip("slow in the interpreter")
    case = Case("many", batch=1, windows=windows, rate=2, overlap=False, width=4, pairs=1)
    arguments = double(make(case))
    dout = torch.randn(1, windows, 4, generator=torch.Generator().manual_seed(2)).double().to(DEVICE)
    got, want = gradients(compress_kv, arguments, dout), gradients(exact, arguments, dout)
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [CASES[7], CASES[8], CASES[9]], ids=str)
def test_gradcheck(compress_kv, only, case):
    only("compressor")
    small = Case("small", 2, 2, min(case.rate, 2), case.overlap, width=4, pairs=1, previous=case.previous)
    arguments = double(make(small))
    names = differentiable(arguments)
    leaves = [arguments[name].requires_grad_() for name in names]
    function = lambda *leaves: compress_kv(**arguments | dict(zip(names, leaves)))  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6)
    (grad,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="compress_kv can be differentiated once"):
        grad.sum().backward()


@pytest.mark.parametrize("case", [CSA, HCA], ids=str)
def test_frozen_parameters_get_no_gradient(compress_kv, only, op, monkeypatch, case):
    """As with LoRA: the others are right, and nothing is computed for the parameters."""
    only("compressor")
    arguments = make(case)
    dout = torch.randn(case.batch, case.windows, case.width, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = dict(zip(differentiable(arguments), gradients(compress_kv, arguments, dout), strict=True))
    sizes, empty_grads = [], op("compressor")._empty_grads

    def spy(*inputs):
        grads = empty_grads(*inputs)
        sizes.extend(grad.numel() for grad in grads[2:4])
        return grads

    monkeypatch.setattr(op("compressor"), "_empty_grads", spy)
    frozen = dict(arguments)
    for name in ("kv", "gate", "previous_kv", "previous_gate"):
        frozen[name] = None if frozen[name] is None else frozen[name].clone().requires_grad_()
    compress_kv(**frozen).backward(dout)
    assert set(sizes) == {0}
    for name in ("kv", "gate", "previous_kv", "previous_gate"):
        assert frozen[name] is None or torch.equal(frozen[name].grad, expected[name])
    assert frozen["position_bias"].grad is None


def test_forward_mode_and_batched_gradients(compress_kv, only):
    only("compressor")
    arguments = make(HCA)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="gate carries a forward-mode"):
        gate = torch.autograd.forward_ad.make_dual(arguments["gate"], arguments["gate"])
        compress_kv(**arguments | dict(gate=gate))
    arguments["kv"].requires_grad_()
    out = compress_kv(**arguments)
    rows = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (batched,) = torch.autograd.grad(out, arguments["kv"], rows, is_grads_batched=True, retain_graph=True)
    for row, grad in zip(rows, batched, strict=True):
        assert torch.equal(grad, torch.autograd.grad(out, arguments["kv"], row, retain_graph=True)[0])


def test_no_gradient_for_tables(compress_kv, only):
    only("compressor")
    arguments = make(CSA)
    arguments["cos"].requires_grad_()
    arguments["position_bias"].requires_grad_()
    compress_kv(**arguments).sum().backward()
    assert arguments["cos"].grad is None and arguments["position_bias"].grad.any()


def test_offsets_past_int32(compress_kv, only):
    """token strides below 2^31 whose product with the token is not."""
    only("compressor")
    if DEVICE == "cpu":
        pytest.skip("4 GB that others need here; the GPU runs this")
    case = Case("far", batch=1, windows=1, rate=3, overlap=False, width=64, pairs=4)
    arguments = make(case, torch.bfloat16)
    stride = 2**30 + 64
    far = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 3, 64), (0, stride, 1))
    far.copy_(arguments["kv"])
    assert torch.equal(compress_kv(**arguments | dict(kv=far)), compress_kv(**arguments))


# torch.library and torch.compile.


@pytest.mark.parametrize("case", [CSA, HCA, CASES[10]], ids=str)
def test_opcheck(op, only, case):
    only("compressor")
    ops, arguments = op("compressor").ops, make(case)
    names = differentiable(arguments)
    tensors = [arguments[name] for name in NAMES]
    leaves = [x.clone().requires_grad_() if name in names else x for name, x in zip(NAMES, tensors)]
    for numerics in ("transformers", "official"):
        options = (case.rate, case.overlap, 1e-6, numerics)
        torch.library.opcheck(ops.compress_kv.default, (*leaves, *options, True))
        torch.library.opcheck(ops.compress_kv.default, (*tensors, *options, False))
    entries, pooled = ops.compress_kv(*tensors, *options, True)
    # The backward's own derivative is refused, so its autograd registration is not checked.
    torch.library.opcheck(
        ops.compress_kv_backward.default,
        (torch.ones_like(entries), *tensors, pooled, *options, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", [CSA, HCA], ids=str)
def test_fullgraph(compress_kv, case, train):
    arguments = make(case)
    names = differentiable(arguments)
    for name in names:
        arguments[name].requires_grad_(train)
    compiled = torch.compile(compress_kv, fullgraph=True, backend="aot_eager")
    expected, got = compress_kv(**arguments), compiled(**arguments)
    assert torch.equal(expected, got) and expected.stride() == got.stride()
    if train:
        leaves = [arguments[name] for name in names]
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (expected, got)]
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("case", [CSA, HCA], ids=str)
def test_no_recompile_per_window_count(compress_kv, case):
    """The second length makes the size dynamic; after that no length compiles again. 1 is a special size of its own."""
    counter = CompileCounter()
    compiled = torch.compile(compress_kv, fullgraph=True, backend=counter)
    for windows in (7, 5, 2, 3, 16, 33, 1):
        arguments = make(Case(case.name, case.batch, windows, case.rate, case.overlap, case.width, case.pairs, case.previous))
        assert torch.equal(compiled(**arguments), compress_kv(**arguments))
    assert counter.frame_count <= 3, counter.frame_count


def test_meta_tensors_give_meta_results(compress_kv):
    arguments = make(CSA)
    expected = compress_kv(**arguments)
    out = compress_kv(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()})
    assert out.is_meta and out.shape == expected.shape and out.stride() == expected.stride()


# Bad input.

BAD = {
    "integer kv": (dict(kv=torch.int32), TypeError, "kv must be float16, bfloat16, float32 or float64, got torch.int32"),
    "dtypes of kv and gate": (dict(gate=torch.bfloat16), TypeError, "kv is torch.float32 and gate is torch.bfloat16"),
    "dtypes of the tables": (dict(sin=torch.bfloat16), TypeError, "cos is torch.float32 and sin is torch.bfloat16"),
    "integer bias": (dict(position_bias=torch.int64), TypeError, "position_bias must be float16.*got torch.int64"),
    "no tensor": (dict(norm_weight=1.0), TypeError, "norm_weight must be a torch.Tensor, got float"),
    "no kv": (dict(kv=None), TypeError, "kv must be a torch.Tensor, got NoneType"),
    "another device": (dict(cos="meta"), ValueError, "cos is on meta and kv is on"),
    "state elsewhere": (dict(previous_gate="meta"), ValueError, "previous_gate is on meta and kv is on"),
    "two dimensions": (dict(kv=(20, 256)), ValueError, r"kv and gate must be \[B, W \* rate, channels\], got \(20, 256\)"),
    "gate of other tokens": (dict(gate=(3, 16, 256)), ValueError, r"kv and gate must be .*\(3, 20, 256\) and \(3, 16, 256\)"),
    "part of a window": (dict(kv=(3, 18, 256), gate=(3, 18, 256)), ValueError, "kv and gate hold 18 tokens.*rate=4"),
    "rate 0": (dict(rate=0), ValueError, "rate must be at least 1, got 0"),
    "another rate": (dict(rate=5), ValueError, r"position_bias must be \[rate, channels\], \(5, 256\), got \(4, 256\)"),
    "no overlap": (dict(overlap=False), ValueError, "kv and gate have 256 channels; with overlap=False.*must have 128"),
    "width": (dict(norm_weight=(64,)), ValueError, "kv and gate have 256 channels; with overlap=True.*64 they must have 128"),
    "odd width": (dict(norm_weight=(127,)), ValueError, r"norm_weight must be \[D\] with an even D, got \(127,\)"),
    "weight of rows": (dict(norm_weight=(1, 128)), ValueError, r"norm_weight must be \[D\] with an even D, got \(1, 128\)"),
    "bias of one series": (dict(position_bias=(4, 128)), ValueError, r"position_bias must be .*\(4, 256\), got \(4, 128\)"),
    "tables of tokens": (dict(cos=(1, 20, 32), sin=(1, 20, 32)), ValueError, "cos and sin must be .* 3 batch rows and 5 windows"),
    "tables of a batch": (dict(cos=(2, 5, 32), sin=(2, 5, 32)), ValueError, "cos and sin must be .* 3 batch rows and 5 windows"),
    "tables differ": (dict(sin=(3, 5, 31)), ValueError, r"cos and sin must be .*\(3, 5, 32\) and \(3, 5, 31\)"),
    "tables too wide": (dict(cos=(1, 5, 65), sin=(1, 5, 65)), ValueError, "cos and sin hold 65 pairs.*128 channels"),
    "half a state": (dict(previous_gate=None), ValueError, "previous_kv and previous_gate come together"),
    "state of both series": (dict(previous_kv=(3, 4, 256)), ValueError, r"previous_kv must be \[B, rate, D\], \(3, 4, 128\)"),
    "state of other rows": (dict(previous_gate=(2, 4, 128)), ValueError, r"previous_gate must be .*got \(2, 4, 128\)"),
    "rate 4.0": (dict(rate=4.0), TypeError, "rate must be an int, got 4.0"),
    "overlap 1": (dict(overlap=1), TypeError, "overlap must be True or False, got 1"),
    "no eps": (dict(eps=None), TypeError, "eps must be a float, got None"),
    "negative eps": (dict(eps=-1.0), ValueError, "eps must be finite and not negative, got -1.0"),
    "sparse gate": (dict(gate="sparse"), TypeError, "gate must be a dense tensor, got torch.sparse_coo"),
    "numerics": (dict(numerics="exact"), ValueError, "numerics must be one of transformers, official, got 'exact'"),
}  # fmt: skip


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(compress_kv, name, train):
    changes, error_type, message = BAD[name]
    arguments = make(CSA)
    for key, change in changes.items():
        if isinstance(change, tuple):
            arguments[key] = torch.ones(change, device=DEVICE)
        elif isinstance(change, torch.dtype) or change == "meta":
            arguments[key] = arguments[key].to(change)
        elif change == "sparse":
            arguments[key] = arguments[key].to_sparse()
        else:
            arguments[key] = change
    for key in ("kv", "position_bias"):
        if isinstance(arguments[key], torch.Tensor) and arguments[key].is_floating_point():
            arguments[key].requires_grad_(train)
    with pytest.raises(error_type, match=message):
        compress_kv(**arguments)


def test_state_without_overlap(compress_kv):
    state = torch.ones(HCA.batch, HCA.rate, HCA.width, device=DEVICE)
    with pytest.raises(ValueError, match="previous_kv and previous_gate are of an overlapping window; overlap is False"):
        compress_kv(**make(HCA) | dict(previous_kv=state, previous_gate=state))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(rate=1025, width=2), "windows of 1025 slots are longer than 1024"),
        (dict(rate=1, width=8194), "entries of 8194 channels are wider than 8192"),
    ],
    ids=["slots", "width"],
)
def test_what_triton_does_not_cover(compress_kv, only, change, reason):
    backend = only("compressor")
    arguments = make(Case("large", batch=1, windows=1, overlap=False, pairs=1, **change))
    if backend == "reference":
        assert error(compress_kv(**arguments), exact(**arguments)) < 1e-6
    else:
        with pytest.raises(NotImplementedError, match=f"triton: {reason}"):
            compress_kv(**arguments)


@pytest.mark.parametrize("limit", [65536, 101376, 232448])
@pytest.mark.parametrize("slot_bytes", [4, 8, 10, 16, 32])
@pytest.mark.parametrize("width", [2, 96, 128, 512, 8192])
@pytest.mark.parametrize("slots", [1, 3, 8, 128, 1024])
def test_configs_fit_every_card(op, slots, width, slot_bytes, limit):
    """the windows in flight fit into the shared memory; a tile covers the slots and its warps the tile."""
    configs = importlib.import_module(op("compressor").__package__ + ".configs")
    for backward in (False, True):
        pool = configs.choose_pool_config(1000, slots, width, slot_bytes, limit, backward)
        assert pool.stages == 1 or pool.stages * pool.slots * pool.channels * slot_bytes <= limit
        assert slots <= pool.slots < 2 * slots and width <= pool.channels * pool.blocks < 2 * max(2, width)
        assert 1 <= pool.num_warps <= 16 and 1 <= pool.groups <= 1000
    norm = configs.choose_norm_config(width)
    assert norm.width >= width and 1 <= norm.num_warps <= 16
    for value in (pool.slots, pool.channels, pool.num_warps, norm.rows, norm.width, norm.num_warps):
        assert value & (value - 1) == 0
