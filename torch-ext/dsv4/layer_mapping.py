"""Which layer replaces which transformers class, and the calls that put them in place.

`kernels` and `transformers` are imported inside functions: loading the kernel needs neither.
"""

import types
from dataclasses import dataclass

from torch import nn

from . import layers

DEVICES = ("cpu", "cuda", "rocm", "xpu")
MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
OLDEST, NEWEST = (5, 17), (5, 24)


@dataclass(frozen=True)
class Row:
    """One transformers class and the layer for it, from transformers `since` up to and including `until`."""

    cls: str
    layer: str
    key: str  # the name that kernels' mapping is looked up by
    module: str = MODELING
    since: tuple[int, int] = OLDEST
    until: tuple[int, int] = NEWEST


ROWS = (
    # transformers itself decorates this class with the key "RMSNorm"; another key would hide it from its own mapping.
    Row("DeepseekV4RMSNorm", "DeepseekV4RMSNormCastFirst", key="RMSNorm", until=(5, 19)),
    Row("DeepseekV4RMSNorm", "DeepseekV4RMSNorm", key="RMSNorm", since=(5, 20)),
    Row("DeepseekV4UnweightedRMSNorm", "DeepseekV4UnweightedRMSNorm", key="DeepseekV4UnweightedRMSNorm"),
    Row("DeepseekV4Attention", "DeepseekV4Attention", key="DeepseekV4Attention"),
)


@dataclass(frozen=True)
class LoadedLayer:
    """kernels' layer repository for the module that is loaded already: no Hub request, and the version the user chose."""

    layer_name: str
    kernel: str = __package__

    def load(self) -> type[nn.Module]:
        return getattr(layers, self.layer_name)


def layer_rows() -> list[Row]:
    """The rows for the installed transformers. Raises RuntimeError if its version is not supported."""
    version = _transformers_version()
    return [row for row in ROWS if row.since <= version <= row.until]


def register_layer_mapping() -> None:
    """Name transformers' DeepSeek-V4 classes for `kernels` and map the names to this kernel's layers, process-wide.

    Afterwards `kernels.kernelize(model, mode=...)` uses them, and so does `use_kernels=True` where transformers accepts
    the installed `kernels`. The key "RMSNorm" is shared with other models of transformers; `dsv4.kernelize` leaves the
    process's mappings alone.

    Raises:
        RuntimeError: the installed transformers is not supported.
    """
    import kernels

    _name_classes()
    kernels.register_kernel_mapping(_mapping())
    # transformers registers its own defaults, among them an RMSNorm, again at every `use_kernels=True`.
    from transformers.integrations import hub_kernels

    if hasattr(hub_kernels, "get_kernel_mapping_transformers"):
        hub_kernels.get_kernel_mapping_transformers().update(_mapping())


def kernelize(model: nn.Module, mode=None, device: str | None = None) -> nn.Module:
    """Replace the forward of the model's DeepSeek-V4 modules by this kernel's layers, in place.

    Args:
        model: a transformers DeepSeek-V4 model, or a module that contains one.
        mode: a `kernels.Mode`. None takes TRAINING or INFERENCE from `model.training`, and again whenever `.train()` or
            `.eval()` changes it.
        device: "cpu", "cuda", "rocm" or "xpu". None takes the device of the model's parameters.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no DeepSeek-V4 module, or the device or mode is none of those above.
        RuntimeError: the installed transformers is not supported.
    """
    from kernels import Mode

    rows = layer_rows()
    classes = {(row.module, row.cls) for row in rows}
    if not any((type(module).__module__, type(module).__name__) in classes for module in model.modules()):
        raise ValueError(f"model must contain transformers' DeepSeek-V4 modules; {type(model).__name__} has none")
    if mode is not None and not isinstance(mode, Mode):
        raise ValueError(f"mode must be a kernels.Mode or None, got {mode!r}")
    device = device or _device_type(model)
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    _name_classes()
    _kernelize(model, mode, device)
    if mode is None:
        model.train = types.MethodType(_train_and_kernelize, model)
    else:
        _forget(model, "train", _train_and_kernelize)
    return model


def unkernelize(model: nn.Module) -> nn.Module:
    """Give every module its original forward back. A model that was not kernelized stays as it is. Returns the model."""
    _forget(model, "train", _train_and_kernelize)
    ours = {getattr(layers, row.layer).forward for row in ROWS}
    for module in model.modules():
        if "_old_forward" in module.__dict__ and module_forward(module) in ours:
            module._old_forward = types.MethodType(type(module).forward, module)
        # kernels binds the original, too, where a layer does not serve the mode.
        elif "forward" in module.__dict__ and module_forward(module) in ours | {type(module).forward}:
            del module.forward
    return model


def module_forward(module: nn.Module):
    """The function that runs as the module's forward, below accelerate's device hook if there is one."""
    forward = module.__dict__.get("_old_forward") or module.forward
    return getattr(forward, "__func__", forward)


def _kernelize(model, mode, device):
    import kernels

    if mode is None:
        mode = kernels.Mode.TRAINING if model.training else kernels.Mode.INFERENCE
    # accelerate (device_map) moves inputs between devices in a wrapper that calls `_old_forward`: replace that one.
    hooked = {module: module.forward for module in model.modules() if "_old_forward" in module.__dict__}
    with kernels.use_kernel_mapping(_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device=device)
    for module, hook in hooked.items():
        if module.forward is not hook:
            module._old_forward, module.forward = module.forward, hook


def _train_and_kernelize(model, mode: bool = True):
    """`model.train` of a model that was kernelized without a fixed mode."""
    changed = model.training != mode
    type(model).train(model, mode)
    if changed:
        _kernelize(model, None, _device_type(model))
    return model


def _forget(module, name, function):
    """Remove an instance attribute if it is `function` bound to the module."""
    if getattr(module.__dict__.get(name), "__func__", None) is function:
        delattr(module, name)


def _mapping():
    return {row.key: {device: LoadedLayer(row.layer) for device in DEVICES} for row in layer_rows()}


def _name_classes():
    import importlib

    from kernels import replace_kernel_forward_from_hub

    for row in layer_rows():
        replace_kernel_forward_from_hub(getattr(importlib.import_module(row.module), row.cls), row.key)


def _device_type(model):
    import torch

    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("model has no parameters to take a device from; pass device")
    kind = parameter.device.type
    return "rocm" if kind == "cuda" and torch.version.hip else kind


def _transformers_version() -> tuple[int, int]:
    supported = f"dsv4 supports transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    try:
        import transformers
    except ModuleNotFoundError:
        raise RuntimeError(f"{supported}; it is not installed") from None
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        raise RuntimeError(f"{supported}; {transformers.__version__} is installed")
    return version
