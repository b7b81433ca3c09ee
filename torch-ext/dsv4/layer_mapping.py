"""Which layer replaces which transformers class, and the calls that put them in place.

`kernels` and `transformers` are imported inside functions: loading the kernel needs neither.
"""

import itertools
import re
import types
from dataclasses import dataclass

import torch
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


def kernelize(model: nn.Module, mode=None, device: str | torch.device | None = None) -> nn.Module:
    """Replace the forward of the model's DeepSeek-V4 modules by this kernel's layers, in place.

    Left alone, and named with the reason by `kernelization_report`, are subclasses with a forward of their own, modules
    whose forward was set by hand, and everything that is not DeepSeek-V4. A pickle of the model loads with the original
    forwards.

    Args:
        model: a transformers DeepSeek-V4 model, or a module that contains one.
        mode: a `kernels.Mode`. None takes TRAINING or INFERENCE from `model.training`, and again whenever `.train()` or
            `.eval()` changes it.
        device: "cpu", "cuda", "rocm" or "xpu". None takes the device of the model's parameters.

    Returns:
        The same model.

    Raises:
        TypeError: model is no torch module.
        ValueError: the model has no DeepSeek-V4 module, or the device or mode is none of those above, or not available.
        RuntimeError: the installed transformers is not supported.
    """
    from kernels import Mode

    check_model(model)
    rows = layer_rows()
    if not any(host_class(module, rows) for module in model.modules()):
        raise ValueError(f"model must contain transformers' DeepSeek-V4 modules; {type(model).__name__} has none")
    if mode is not None and (not isinstance(mode, Mode) or not (mode & Mode.INFERENCE or mode & Mode.TRAINING)):
        raise ValueError(f"mode must be None, or a kernels.Mode with INFERENCE or TRAINING in it, got {mode!r}")
    if device is not None:
        device = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    kind = _device_type(model) if device is None else device
    if kind not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {kind!r}")
    if (kind in ("cuda", "rocm") and not torch.cuda.is_available()) or (kind == "xpu" and not torch.xpu.is_available()):
        raise ValueError(f"device {kind!r} is not available in this process")
    _name_classes()
    _kernelize(model, mode, kind)
    _forget_train(model)
    if mode is None:
        model.train = types.MethodType(_train, model)
        model._dsv4_device = device
    return model


def unkernelize(model: nn.Module) -> nn.Module:
    """Give every module its original forward back. A model that was not kernelized stays as it is. Returns the model.

    Raises:
        TypeError: model is no torch module.
    """
    check_model(model)
    _forget_train(model)
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


def host_class(module: nn.Module, rows: list[Row]) -> tuple[type, Row] | None:
    """The transformers class that the module is an instance of, and its row; None without one."""
    for cls in type(module).__mro__:
        for row in rows:
            if (row.module, row.cls) == (cls.__module__, cls.__name__):
                return cls, row
    return None


def why_not_layer(module: nn.Module, cls: type) -> str | None:
    """Why no layer may take the place of this module's forward; None if one may."""
    if type(module).forward is not cls.forward:
        return "a subclass with a forward of its own"
    forward = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    # kernels, and so every kernel, binds the forward of a layer class; anything else is somebody's own.
    if forward is None or (getattr(forward, "__self__", None) is module and forward.__qualname__.endswith(".forward")):
        return None
    return "its forward was set on the module"


def check_model(model) -> None:
    """Raise TypeError unless the model is a torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _kernelize(model, mode, device):
    import kernels
    from kernels.layer.layer import KernelizeFallback, kernelize_layer

    if mode is None:
        mode = kernels.Mode.TRAINING if model.training else kernels.Mode.INFERENCE
    rows = layer_rows()
    # Module by module, because kernels.kernelize takes every class that shares a key with ours, such as Llama's RMSNorm,
    # and gives each class without a layer here its original forward back.
    with kernels.use_kernel_mapping(_mapping(), inherit_mapping=False):
        for module in model.modules():
            host = host_class(module, rows)
            if host is None or why_not_layer(module, host[0]):
                continue
            # accelerate (device_map) moves inputs in a wrapper that calls `_old_forward`: that one is replaced.
            hook = module.forward if "_old_forward" in module.__dict__ else None
            kernelize_layer(module, mode=mode, device_type=kernels.Device(device), use_fallback=KernelizeFallback.DEFAULT)
            if hook is not None:
                module._old_forward, module.forward = module.forward, hook


def _train(model, mode: bool = True):
    """`model.train` of a model that was kernelized without a fixed mode."""
    changed = model.training != mode
    type(model).train(model, mode)
    device = model._dsv4_device or _device_type(model)
    if changed and device in DEVICES:
        _kernelize(model, None, device)
    return model


_train.__name__ = "train"  # pickle stores a bound method by this name: the loaded model has its class's own
_train.dsv4 = True


def _forget_train(model):
    """Remove the `train` that kernelize has set, be it this build's or another's."""
    if getattr(model.__dict__.get("train"), "dsv4", False):
        del model.train, model._dsv4_device


def _mapping():
    return {row.key: {device: LoadedLayer(row.layer) for device in DEVICES} for row in layer_rows()}


def _name_classes():
    import importlib

    from kernels import replace_kernel_forward_from_hub

    for row in layer_rows():
        replace_kernel_forward_from_hub(getattr(importlib.import_module(row.module), row.cls), row.key)


def _device_type(model):
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    if tensor is None:
        raise ValueError("model has no parameters to take a device from; pass device")
    return "rocm" if tensor.device.type == "cuda" and torch.version.hip else tensor.device.type


def _transformers_version() -> tuple[int, int]:
    supported = f"dsv4 supports transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    try:
        import transformers
    except ModuleNotFoundError:
        raise RuntimeError(f"{supported}; it is not installed") from None
    version = tuple(map(int, re.match(r"(\d+)\.(\d+)", transformers.__version__).groups()))
    if not OLDEST <= version <= NEWEST:
        raise RuntimeError(f"{supported}; {transformers.__version__} is installed")
    return version
