"""What became of each DeepSeek-V4 module of a model: which layer it runs, or why it kept its own forward."""

import os
from collections import Counter
from dataclasses import dataclass

from torch import nn

from . import layers
from .layer_mapping import MODELING, check_model, host_class, layer_rows, module_forward, why_not_layer


@dataclass(frozen=True)
class ModuleReport:
    """One module: its name in the model, its class, the layer that runs (None: the original forward) and why."""

    name: str
    cls: str
    layer: str | None
    reason: str


@dataclass(frozen=True)
class KernelizationReport:
    """All DeepSeek-V4 modules of a model, in model order; `str()` is a table with one line per class and outcome."""

    modules: tuple[ModuleReport, ...]

    def __str__(self) -> str:
        if not self.modules:
            return "no DeepSeek-V4 modules"
        counts = Counter((module.cls, module.layer or "(original)", module.reason) for module in self.modules)
        lines = [("class", "modules", "layer", "reason")]
        lines += [(cls, str(count), layer, reason) for (cls, layer, reason), count in counts.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip() for line in lines
        )


def kernelization_report(model: nn.Module) -> KernelizationReport:
    """Report on every module in the model that is, or derives from, a transformers DeepSeek-V4 class.

    Raises:
        TypeError: model is no torch module.
        RuntimeError: the installed transformers is not supported.
    """
    check_model(model)
    rows = layer_rows()
    modules = []
    for name, module in model.named_modules():
        from_transformers = any(cls.__module__ == MODELING for cls in type(module).__mro__)
        if from_transformers and not hasattr(module, "config_class"):
            modules.append(_report(name, module, host_class(module, rows)))
    return KernelizationReport(tuple(modules))


def _report(name, module, host):
    cls = type(module).__name__
    if host is None:
        return ModuleReport(name, cls, None, "dsv4 has no layer for this class")
    layer = getattr(layers, host[1].layer)
    if module_forward(module) is layer.forward:
        return ModuleReport(name, cls, host[1].layer, "")
    if reason := why_not_layer(module, host[0]):
        return ModuleReport(name, cls, None, reason)
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
        return ModuleReport(name, cls, None, "DISABLE_KERNEL_MAPPING is set")
    if module.training and not getattr(layer, "has_backward", True):
        return ModuleReport(name, cls, None, "the layer has no backward and the module is in training mode")
    return ModuleReport(name, cls, None, "not kernelized, or by another kernel")
