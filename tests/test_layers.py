"""Each layer against the transformers module it replaces, of the installed version, and the model they make up."""

import copy
import math

import pytest
import torch
import transformers
from compare import assert_no_further, error
from conftest import DEVICE
from tiny import tiny_config, tiny_ids, tiny_model

pytestmark = pytest.mark.transformers_matrix
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE_KEYWORD = "cache" if TRANSFORMERS >= (5, 24) else "past_key_values"


@pytest.fixture(scope="module")
def host():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


def double(module):
    """The module in float64. Where transformers casts to float32 inside, its float64 run is no better than that."""
    module = copy.deepcopy(module).double()
    if hasattr(module, "config"):
        module.config._experts_implementation = "eager"  # the default, grouped_mm, has no float64
    return module


def kernelized(dsv4, module):
    """A copy of one module with our layer's forward, as kernelize would bind it."""
    module = copy.deepcopy(module)
    row = next(row for row in dsv4.layer_mapping.layer_rows() if row.cls == type(module).__name__)
    module.forward = getattr(dsv4.layers, row.layer).forward.__get__(module)
    return module


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [32, 512])
def test_rms_norm(dsv4, host, width, dtype, weight_dtype):
    module = host.DeepseekV4RMSNorm(width, eps=1e-6).to(DEVICE)
    module.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(DEVICE, weight_dtype)
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.weight.double()
    assert_no_further(kernelized(dsv4, module)(x), module(x), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unweighted_rms_norm(dsv4, host, dtype):
    module = host.DeepseekV4UnweightedRMSNorm(eps=1e-6)
    q = torch.randn(2, 7, 4, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype).transpose(1, 2)
    exact = q.double() * (q.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out, theirs = kernelized(dsv4, module)(q), module(q)
    assert_no_further(out, theirs, exact)
    assert out.stride() == theirs.stride()


def attention_inputs(host, model, tokens, dtype, seed=0):
    hidden = torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    positions = torch.arange(tokens, device=DEVICE)[None]
    rotary = model.model.rotary_emb
    embeddings = {kind: rotary(hidden, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    mask = torch.ones(tokens, tokens, device=DEVICE).tril().triu(-3).log().to(dtype)[None, None].expand(2, 1, -1, -1)
    return dict(hidden_states=hidden, position_embeddings=embeddings, position_ids=positions, attention_mask=mask)


@pytest.mark.parametrize("tokens", [1, 3, 19])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["sliding", "csa", "hca"])
def test_attention(dsv4, host, layer, tokens):
    """Forward and gradients of input and weights, of the module alone, in fp32."""
    model = tiny_model()
    module = model.model.layers[layer].self_attn
    results = []
    for attention in (kernelized(dsv4, module), module, double(module)):
        inputs = attention_inputs(host, model, tokens, torch.float32)
        if attention.q_a_proj.weight.dtype == torch.float64:
            inputs = {key: value.double() if key in ("hidden_states", "attention_mask") else value for key, value in inputs.items()}
        inputs["hidden_states"].requires_grad_()
        out, weights = attention(**inputs)
        parameters = [inputs["hidden_states"], *attention.parameters()]
        grads = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        results.append((out, weights, *grads))
    for ours, theirs, exact in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs.any():
            assert_close_to_host(ours, theirs, exact)


def assert_close_to_host(ours, theirs, exact):
    """In a whole module fp32 noise of sums in torch's own GEMMs is larger than one ulp of the result: 4 ulp."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert error(ours, exact) <= 1.01 * error(theirs, exact) + 2.0**-21, (error(ours, exact), error(theirs, exact))


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_attention_keyword_of_the_cache(dsv4, host, keyword):
    """`cache` (5.24) and `past_key_values` (before) both reach the cache; the second call sees the first one's keys."""
    from transformers import DynamicCache

    model = tiny_model()
    module = model.model.layers[0].self_attn
    outs = []
    for attention, name in ((kernelized(dsv4, module), keyword), (module, CACHE_KEYWORD)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for step in range(2):
                inputs = attention_inputs(host, model, 3, torch.float32, seed=step)
                inputs["attention_mask"] = None
                out, _ = attention(**inputs, **{name: cache})
        outs.append(out)
        assert cache.get_seq_length() == 6
    torch.testing.assert_close(*outs)


def test_attention_without_autograd_changes_no_input(dsv4, host):
    """The in-place rotations act on tensors of the layer's own ."""
    model = tiny_model()
    for layer in model.model.layers:
        attention = kernelized(dsv4, layer.self_attn)
        inputs = attention_inputs(host, model, 11, torch.float32)
        before = copy.deepcopy(inputs)
        with torch.no_grad():
            first, _ = attention(**inputs)
            second, _ = attention(**inputs)
        assert torch.equal(first, second)
        torch.testing.assert_close(inputs, before, rtol=0, atol=0)
        with_autograd, _ = attention(**inputs)
        torch.testing.assert_close(first, with_autograd)


MASKS = {
    "none": lambda ids: None,
    "left_padding": lambda ids: torch.ones_like(ids).index_fill_(1, torch.arange(3, device=ids.device), 0),
    "right_padding": lambda ids: torch.ones_like(ids).index_fill_(1, torch.arange(16, 19, device=ids.device), 0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_model_logits_and_gradients(dsv4, mask):
    """The whole model in fp32: logits, loss and every parameter's gradient."""
    ids = tiny_ids()
    attention_mask = MASKS[mask](ids)
    results = []
    for prepare in (dsv4.kernelize, lambda model: model, double):
        model = prepare(tiny_model())
        out = model(input_ids=ids, attention_mask=attention_mask, labels=ids)
        out.loss.backward()
        grads = [parameter.grad for _, parameter in model.named_parameters()]
        results.append((out.logits, out.loss, *grads))
    ratios = []
    for ours, theirs, exact in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs.any():
            assert error(ours, exact) < 1e-4
            ratios.append(max(error(ours, exact), 1e-7) / max(error(theirs, exact), 1e-7))
    # Both are fp32 noise, larger here for the one and there for the other; over 80 tensors they are as large.
    assert len(ratios) > 80 and math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.5


def test_generate_greedy(dsv4):
    ids = tiny_ids(batch=2, tokens=9)
    plain = tiny_model()
    expected = plain.generate(ids, max_new_tokens=12, do_sample=False)
    model = dsv4.kernelize(tiny_model())
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    # A second request with the same model starts from nothing.
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=2).shape == (2, 14)


def test_chunked_prefill_and_decode(dsv4):
    """One shot, in chunks and token by token give the same logits."""
    from transformers import DynamicCache

    ids = tiny_ids(tokens=17)
    model = dsv4.kernelize(tiny_model())
    with torch.no_grad():
        expected = model(ids).logits
        for chunks in ([17], [5, 12], [8, 1, 8], [1] * 17):
            cache, logits = DynamicCache(config=model.config), []
            for chunk in ids.split(chunks, dim=1):
                logits.append(model(chunk, use_cache=True, **{CACHE_KEYWORD: cache}).logits)
            torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_bf16_model_is_as_close_as_the_host(dsv4):
    """bf16 weights, fp32 norms, mHC and sinks, as from_pretrained loads them; errors against the fp64 run of them."""
    if TRANSFORMERS < (5, 20):
        pytest.skip("transformers before 5.20 returns fp32 from its norms, which its bf16 linears reject")
    ids = tiny_ids()
    with torch.no_grad():
        plain = tiny_model(torch.bfloat16)
        theirs = plain(ids).logits
        exact = double(plain)(ids).logits
        ours = dsv4.kernelize(plain)(ids).logits
    # Two bf16 runs take different routes at near ties: compare their errors, with 10 % for that.
    assert error(ours, exact) <= 1.1 * error(theirs, exact), (error(ours, exact), error(theirs, exact))


def test_autocast_and_gradient_checkpointing(dsv4):
    ids = tiny_ids()
    losses, grads = [], []
    for prepare in (dsv4.kernelize, lambda model: model):
        model = tiny_model().train()
        model.gradient_checkpointing_enable()
        model = prepare(model)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append(model.model.layers[1].self_attn.q_b_proj.weight.grad)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)
    assert error(*grads) < 0.2 and grads[0].isfinite().all()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["sliding", "csa", "hca"])
def test_attention_compiles_without_graph_breaks_of_ours(dsv4, host, layer, train):
    """The sliding layer compiles fullgraph; CSA and HCA do as far as transformers' own compressor does."""
    model = tiny_model()
    attention = kernelized(dsv4, model.model.layers[layer].self_attn)
    inputs = attention_inputs(host, model, 12, torch.float32)
    inputs["hidden_states"].requires_grad_(train)
    with torch.set_grad_enabled(train):
        expected, _ = attention(**inputs)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs)[0], expected)


def test_tiny_config_is_what_it_says():
    config = tiny_config()
    assert config.qk_rope_head_dim == 8 and config.rope_parameters["main"]["partial_rotary_factor"] == 0.25
