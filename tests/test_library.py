"""The registered ops under torch.library's own checks and torch.compile."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import DEVICE
from torch._dynamo.testing import CompileCounter


def rope_inputs(tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 3, 24, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    angle = torch.rand(1, tokens, 4, generator=generator).to(DEVICE)
    return x, angle.cos(), angle.sin()


def norm_inputs(tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(2, tokens, 48, generator=generator).to(DEVICE, dtype), torch.rand(48, generator=generator).to(DEVICE)


def test_opcheck(op, only):
    only("rope")
    only("rms_norm")
    rope, norm = op("rope").ops, op("rms_norm").ops
    x, cos, sin = rope_inputs()
    for transposed in (False, True):
        torch.library.opcheck(rope.rope.default, (x.clone().requires_grad_(), cos, sin, 1, False, transposed))
    torch.library.opcheck(rope.rope_.default, (x.clone(), cos, sin, 1, True))
    x, weight = norm_inputs()
    for rounding in ("once", "normalized"):
        torch.library.opcheck(norm.rms_norm.default, (x.clone().requires_grad_(), weight.clone().requires_grad_(), 1e-6, rounding))
    torch.library.opcheck(norm.rms_norm.default, (x.clone().requires_grad_(), None, 1e-6, "scale"))
    # The backward's own derivative is refused, so its autograd registration is not checked.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(norm.rms_norm_backward.default, (torch.ones_like(x), x, weight, 1e-6, True), test_utils=tests)
    torch.library.opcheck(norm.rms_norm_backward.default, (torch.ones_like(x), x, None, 1e-6, False), test_utils=tests)


def test_meta_tensors_give_meta_results(dsv4):
    """After the same call on real tensors, too: nothing prepared for those may serve a tensor without memory."""
    for function, inputs in functions(dsv4).values():
        arguments = inputs()
        expected = function(*arguments)
        out = function(*(argument.to("meta") for argument in arguments))
        assert out.is_meta and out.shape == expected.shape and out.stride() == expected.stride()


def test_modes_and_transforms_see_the_ops(dsv4):
    """The short way past the dispatcher is for plain calls only."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, cos, sin = rope_inputs()
    dsv4.apply_rotary_pos_emb(x, cos, sin)
    with Record():
        dsv4.apply_rotary_pos_emb(x, cos, sin)
        dsv4.rms_norm(x)
    assert any(".rope." in name for name in seen) and any(".rms_norm." in name for name in seen)
    rows = torch.randn(2, 3, 4, device=DEVICE)
    assert torch.equal(torch.func.vmap(dsv4.rms_norm)(rows), dsv4.rms_norm(rows))
    # torch.library's autograd does not support torch.func.grad: its error, and no wrong gradient.
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: dsv4.rms_norm(x).square().sum())(rows)


def functions(dsv4):
    """Each public function as a function of tensors, with an input maker."""

    def rope_in_place(x, cos, sin):
        return dsv4.apply_rotary_pos_emb_(x * 2, cos, sin, inverse=True)

    return {
        "rope": (dsv4.apply_rotary_pos_emb, rope_inputs),
        "rope_in_place": (rope_in_place, rope_inputs),
        "rms_norm": (dsv4.rms_norm, norm_inputs),
    }


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["rope", "rope_in_place", "rms_norm"])
def test_fullgraph(dsv4, name, train):
    function, inputs = functions(dsv4)[name]
    arguments = [argument.requires_grad_(train and index == 0) for index, argument in enumerate(inputs())]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, got = function(*arguments), compiled(*arguments)
    assert torch.equal(expected, got) and expected.stride() == got.stride()
    if train:
        assert torch.equal(*(torch.autograd.grad(out.square().sum(), arguments[0])[0] for out in (expected, got)))


@pytest.mark.parametrize("name", ["rope", "rope_in_place", "rms_norm"])
def test_no_recompile_per_token_count(dsv4, name):
    """The second length makes the size dynamic; after that no length compiles again. 1 is a special size of its own."""
    function, inputs = functions(dsv4)[name]
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for tokens in (7, 5, 2, 3, 16, 64, 33, 100, 1):
        arguments = inputs(tokens)
        assert torch.equal(compiled(*arguments), function(*arguments))
    assert counter.frame_count <= 3, counter.frame_count


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing; kernel variants exist on a GPU only")
@pytest.mark.parametrize("name", ["rope", "rms_norm"])
def test_kernel_variants_do_not_grow_with_lengths(dsv4, op, name):
    """at most 4 compiled variants per kernel for 100 lengths."""
    function, inputs = functions(dsv4)[name]
    kernels = op(name).BACKENDS.modules["triton"]
    kernel = kernels._rope_kernel if name == "rope" else kernels._forward_kernel
    caches = kernel.device_caches[torch.cuda.current_device()][0]
    before = len(caches)
    for tokens in [*range(1, 65), *range(100, 4000, 100)]:
        function(*inputs(tokens, torch.bfloat16))
    assert len(caches) - before <= 4, len(caches) - before


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and streams need a GPU")
@pytest.mark.parametrize("name", ["rope", "rope_in_place", "rms_norm"])
def test_cuda_graph_and_side_stream(dsv4, name):
    function, inputs = functions(dsv4)[name]
    arguments = inputs(64, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = function(*arguments)
    fresh = inputs(64, torch.bfloat16)[0] * 3
    arguments[0].copy_(fresh)
    graph.replay()
    assert torch.equal(replayed, function(*arguments)) and not torch.equal(replayed, eager)


@pytest.mark.parametrize("name", ["rope", "rms_norm"])
def test_first_calls_from_many_threads(dsv4, only, name):
    """eight threads, each with lengths of its own, on a cold cache of prepared calls."""
    if only(name) == "triton" and DEVICE == "cpu":
        pytest.skip("Triton's interpreter patches its language module and runs in one thread only")
    function, inputs = functions(dsv4)[name]
    barrier = threading.Barrier(8)

    def work(index):
        barrier.wait()
        return [function(*inputs(tokens)) for tokens in range(index + 1, 60, 8)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for index, outs in enumerate(results):
        for tokens, out in zip(range(index + 1, 60, 8), outs, strict=True):
            assert torch.equal(out, function(*inputs(tokens)))


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["rope", "rms_norm"])
def test_tensors_on_another_device_than_the_current(dsv4, name):
    """launches follow the tensors, and the current device stays."""
    function, inputs = functions(dsv4)[name]
    expected = function(*inputs())
    for index in (1, 0, 1):
        out = function(*(argument.to(f"cuda:{index}") for argument in inputs()))
        assert out.device.index == index and torch.cuda.current_device() == 0
        assert torch.equal(out.cpu(), expected.cpu())
