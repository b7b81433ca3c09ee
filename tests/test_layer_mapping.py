"""kernelize, unkernelize, register_layer_mapping and the report, on the installed transformers."""

import copy
import importlib
import inspect
import subprocess
import sys
import types

import pytest
import torch
import transformers
from conftest import DEVICE
from kernels import Mode
from tiny import tiny_ids, tiny_model

import kernels

pytestmark = pytest.mark.transformers_matrix
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def ours(dsv4, model):
    """How many modules of each class run a layer of this kernel."""
    counts = {}
    for module in model.modules():
        if inspect.getmodule(module.forward).__name__.startswith(dsv4.__name__):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return counts


def expected_counts(dsv4, model):
    classes = {row.cls for row in dsv4.layer_mapping.layer_rows()}
    counts = {}
    for module in model.modules():
        if type(module).__name__ in classes:
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    assert counts["DeepseekV4Attention"] == 3 and counts["DeepseekV4RMSNorm"] > 10
    assert counts["DeepseekV4UnweightedRMSNorm"] >= 10
    return counts


MODES = {
    "inference": Mode.INFERENCE,
    "training": Mode.TRAINING,
    "inference_compile": Mode.INFERENCE | Mode.TORCH_COMPILE,
    "training_compile": Mode.TRAINING | Mode.TORCH_COMPILE,
    "from_the_model": None,
}


@pytest.mark.parametrize("mode", MODES)
def test_kernelize_replaces_every_module_with_a_layer(dsv4, mode):
    """the count is the expected one, and training gives every parameter of them a finite gradient."""
    model = tiny_model()
    assert dsv4.kernelize(model, mode=MODES[mode]) is model
    assert ours(dsv4, model) == expected_counts(dsv4, model)
    if "training" in mode:
        ids = tiny_ids(tokens=9)
        model(input_ids=ids, labels=ids).loss.backward()
        for name, module in model.named_modules():
            if type(module).__name__ == "DeepseekV4RMSNorm":
                # transformers' indexer selects entries and gets no gradient; every other norm does.
                grad = module.weight.grad
                assert grad is None if "indexer" in name else grad.isfinite().all() and grad.any(), name


def test_unkernelize_restores_the_originals(dsv4):
    model, ids = tiny_model(), tiny_ids()
    with torch.no_grad():
        before = model(ids).logits
        dsv4.kernelize(model)
        assert ours(dsv4, model)
        assert dsv4.unkernelize(model) is model
        assert ours(dsv4, model) == {} and "train" not in model.__dict__
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert torch.equal(model(ids).logits, before)
    dsv4.unkernelize(model)  # nothing to do


def test_train_and_eval_kernelize_again(dsv4, monkeypatch):
    """A layer without a backward leaves in .train() and comes back in .eval(), unless the mode was given."""
    monkeypatch.setattr(dsv4.layers.DeepseekV4Attention, "has_backward", False, raising=False)
    model = dsv4.kernelize(tiny_model())
    assert "DeepseekV4Attention" in ours(dsv4, model)
    assert model.train() is model and model.training
    counts = ours(dsv4, model)
    assert "DeepseekV4Attention" not in counts and "DeepseekV4RMSNorm" in counts
    table = str(dsv4.kernelization_report(model))
    assert "the layer has no backward and the module is in training mode" in table
    assert "DeepseekV4Attention" in ours(dsv4, model.eval())
    dsv4.kernelize(model, mode=Mode.INFERENCE)
    assert "DeepseekV4Attention" in ours(dsv4, model.train())


def test_deepcopy_runs_on_its_own_weights(dsv4):
    model, ids = dsv4.kernelize(tiny_model()), tiny_ids()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(ids).logits
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        assert not torch.allclose(twin(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
    assert twin.eval() is twin and ours(dsv4, twin) == ours(dsv4, model)


def test_subclasses_and_own_forwards_are_left_alone(dsv4):
    """A user's override stays, in a subclass and on an instance, and the report says why."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as host

    class Doubled(host.DeepseekV4RMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class Renamed(host.DeepseekV4RMSNorm):
        pass

    model, ids = tiny_model(), tiny_ids()
    model.model.norm.__class__ = Doubled
    model.model.layers[0].input_layernorm.__class__ = Renamed
    first = model.model.layers[1].input_layernorm
    first.forward = lambda hidden_states: type(first).forward(first, hidden_states) * 3
    with torch.no_grad():
        expected = model(ids).logits
        dsv4.kernelize(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    report = {module.name: module for module in dsv4.kernelization_report(model).modules}
    assert report["model.norm"].reason == "a subclass with a forward of its own"
    assert report["model.layers.0.input_layernorm"].layer
    assert report["model.layers.1.input_layernorm"].reason == "its forward was set on the module"
    dsv4.unkernelize(model)
    assert "forward" in first.__dict__
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_other_models_and_kernels_are_left_alone(dsv4):
    """A Llama norm shares our key in some versions of transformers; another kernel may have an MLP."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = tiny_model()
    both = torch.nn.ModuleList([model, LlamaRMSNorm(8)])
    mlp = model.model.layers[0].mlp.shared_experts
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x), mlp)
    bound = mlp.forward
    dsv4.kernelize(both)
    assert ours(dsv4, both) == expected_counts(dsv4, both) and mlp.forward is bound


def test_pickle_loads_plain(dsv4, tmp_path):
    model, ids = dsv4.kernelize(tiny_model()), tiny_ids()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert ours(dsv4, loaded.eval()) == {} and ours(dsv4, dsv4.kernelize(loaded)) == ours(dsv4, model)


def test_train_never_raises_for_a_device(dsv4):
    model = dsv4.kernelize(tiny_model().to("meta"), device="cpu")
    assert model.train().training and ours(dsv4, model)
    model._dsv4_device = None
    assert not model.eval().training


def test_hooks_see_what_the_module_returned(dsv4):
    """The rotation is not in place where a forward hook keeps the norm's output."""
    model, ids, kept = tiny_model(), tiny_ids(), []
    for layer in model.model.layers:
        layer.self_attn.kv_norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    with torch.no_grad():
        model(ids)
        dsv4.kernelize(model)(ids)
    for theirs, mine in zip(kept[:3], kept[3:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_report(dsv4):
    model = tiny_model()
    before = dsv4.kernelization_report(model)
    assert before.modules and all(module.layer is None for module in before.modules)
    assert "not kernelized, or by another kernel" in str(before)
    report = dsv4.kernelization_report(dsv4.kernelize(model))
    layered = {module.name: module.layer for module in report.modules if module.layer}
    assert len(layered) == sum(ours(dsv4, model).values())
    norm = "DeepseekV4RMSNorm" if TRANSFORMERS >= (5, 20) else "DeepseekV4RMSNormCastFirst"
    assert layered["model.norm"] == norm and layered["model.layers.1.self_attn"] == "DeepseekV4Attention"
    rest = {module.cls: module.reason for module in report.modules if not module.layer}
    assert rest["DeepseekV4Experts"] == "dsv4 has no layer for this class"
    lines = str(report).splitlines()
    assert lines[0].split() == ["class", "modules", "layer", "reason"]
    assert any(line.split() == ["DeepseekV4Attention", "3", "DeepseekV4Attention"] for line in lines)


def test_register_and_kernels_kernelize(dsv4):
    """`kernels.kernelize` after registering uses the same layers, in every mode, without a request to the Hub."""
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        dsv4.register_layer_mapping()
        for mode in (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE):
            model = kernels.kernelize(tiny_model(), mode=mode)
            assert ours(dsv4, model) == expected_counts(dsv4, model)
        assert ours(dsv4, dsv4.unkernelize(model)) == {}


def test_kernelize_leaves_the_process_mapping_alone(dsv4):
    from kernels.layer.globals import _KERNEL_MAPPING

    before = dict(_KERNEL_MAPPING.get())
    dsv4.kernelize(tiny_model())
    assert _KERNEL_MAPPING.get() == before


USE_KERNELS = pytest.mark.skipif(
    not (5, 18) <= TRANSFORMERS <= (5, 22), reason="this transformers refuses kernels 0.17.2 for its own integration"
)


@USE_KERNELS
def test_use_kernels_of_transformers(dsv4, monkeypatch):
    """transformers' own switch takes the registered layers, and keeps them through .train() and .eval()."""
    from transformers.integrations import hub_kernels

    # Without transformers' other defaults, which a GPU would fetch from the Hub.
    monkeypatch.setattr(hub_kernels, "_KERNEL_MAPPING_CACHE", {"RMSNorm": {"cuda": dsv4.layer_mapping.LoadedLayer("no such layer")}})
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        dsv4.register_layer_mapping()
        model = tiny_model()
        model.use_kernels = True
        assert ours(dsv4, model) == expected_counts(dsv4, model)
        for _ in (model.train(), model.eval()):
            assert ours(dsv4, model) == expected_counts(dsv4, model)
        model(tiny_ids(tokens=5))


@USE_KERNELS
@pytest.mark.skipif(DEVICE == "cpu", reason="transformers' KernelConfig takes no cpu layers")
def test_kernel_config_of_transformers(dsv4, built):
    """KernelConfig with a local kernel; from_pretrained of 5.22 breaks on a local one, set_use_kernels takes it."""
    from transformers import KernelConfig

    dsv4.register_layer_mapping()  # names the classes that transformers does not decorate
    layers = ("DeepseekV4UnweightedRMSNorm", "DeepseekV4Attention")
    names = {"RMSNorm": f"{built}:DeepseekV4RMSNorm"} | {name: f"{built}:{name}" for name in layers}
    model = tiny_model()
    model.set_use_kernels(True, KernelConfig(names, use_local_kernel=True))
    assert ours(dsv4, model) == expected_counts(dsv4, model)
    model(tiny_ids(tokens=5))


def test_accelerate_hooks_stay(dsv4):
    """device_map puts a wrapper around forward that moves inputs: the layer goes below it."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = tiny_model(), tiny_ids()
    with torch.no_grad():
        expected = dsv4.kernelize(copy.deepcopy(model))(ids).logits
        calls = []

        class Count(hooks.ModelHook):
            def pre_forward(self, module, *args, **kwargs):
                calls.append(module)
                return args, kwargs

        for module in list(model.modules()):
            hooks.add_hook_to_module(module, Count())
        dsv4.kernelize(model)
        assert torch.equal(model(ids).logits, expected)
        assert {type(module).__name__ for module in calls} >= {"DeepseekV4Attention", "DeepseekV4RMSNorm", "Linear"}
        report = dsv4.kernelization_report(model)
        assert sum(module.layer is not None for module in report.modules) == sum(expected_counts(dsv4, model).values())
        dsv4.unkernelize(model)
        assert not any(module.layer for module in dsv4.kernelization_report(model).modules)
        calls.clear()
        torch.testing.assert_close(model(ids).logits, expected)
        assert calls


BAD = {
    "no module": (dict(model=None), TypeError, "model must be a torch.nn.Module, got NoneType"),
    "another model": (dict(model=torch.nn.Linear(2, 2)), ValueError, "model must contain transformers' DeepSeek-V4 modules; Linear has none"),
    "mode as text": (dict(mode="training"), ValueError, "mode must be None, or a kernels.Mode.*got 'training'"),
    "fallback mode": (dict(mode=Mode.FALLBACK), ValueError, "mode must be None.*FALLBACK"),
    "device": (dict(device="mps"), ValueError, "device must be one of cpu, cuda, rocm, xpu, got 'mps'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(dsv4, name):
    changes, error, message = BAD[name]
    model = tiny_model()
    arguments = dict(model=model) | changes
    with pytest.raises(error, match=message):
        dsv4.kernelize(**arguments)
    assert ours(dsv4, model) == {} and "train" not in model.__dict__


@pytest.mark.parametrize("version", ["5.16.3", "5.25.0", "4.57.1"])
@pytest.mark.parametrize("function", ["kernelize", "register_layer_mapping", "kernelization_report"])
def test_unsupported_transformers(dsv4, monkeypatch, function, version):
    model = tiny_model()
    # Not the module imported above: transformers puts another object in its place when it first loads a model.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=rf"dsv4 supports transformers 5\.17 to 5\.24; {version} is installed"):
        getattr(dsv4, function)(*([] if function == "register_layer_mapping" else [model]))
    assert ours(dsv4, model) == {}


@pytest.mark.parametrize("transformers_version", [(5, 17), (5, 20), (5, 24)], ids=str)
def test_every_row_names_a_layer_and_versions_do_not_overlap(dsv4, transformers_version):
    keys = [row.key for row in dsv4.layer_mapping.ROWS if row.since <= transformers_version <= row.until]
    assert len(keys) == len(set(keys))
    assert all(issubclass(getattr(dsv4.layers, row.layer), torch.nn.Module) for row in dsv4.layer_mapping.ROWS)


def test_layers_fit_the_installed_classes(dsv4):
    """with kernels' own validation."""
    from kernels.layer.layer import _validate_layer

    for row in dsv4.layer_mapping.layer_rows():
        host = getattr(importlib.import_module(row.module), row.cls)
        _validate_layer(check_cls=host, cls=getattr(dsv4.layers, row.layer), repo=row.layer)


def test_a_new_transformers_process_loads_without_triton_or_gpu(built):
    """importing needs no GPU and no triton; a call that finds no backend says why."""
    code = """
import sys, warnings
warnings.simplefilter("error", category=UserWarning)
sys.modules["triton"] = None
import torch
from pathlib import Path
from kernels import get_local_kernel
dsv4 = get_local_kernel(Path(sys.argv[1]))
assert not torch.cuda.is_initialized() and "transformers" not in sys.modules
print(dsv4.rms_norm(torch.ones(2, 4)))
try:
    dsv4.rms_norm(torch.ones(2, 4, device="meta").to("meta"))
    dsv4.rms_norm.__globals__["BACKENDS"].choose(torch.ones(2, 4, device="meta"))
except NotImplementedError as error:
    print("said:", error)
"""
    run = subprocess.run([sys.executable, "-c", code, str(built)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "tensor([[1.0000" in run.stdout
    assert "triton: triton is not installed; reference: the reference serves CPU tensors only" in run.stdout
