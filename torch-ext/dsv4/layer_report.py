"""What became of each DeepSeek-V4 module of a model: which layer it runs, or why it kept its own forward."""

import os
from collections import Counter
from dataclasses import dataclass

from torch import nn

from . import layers
from .layer_mapping import MODELING, layer_rows, module_forward


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
        counts = Counter((module.cls, module.layer or "(original)", module.reason) for module in self.modules)
        lines = [("class", "modules", "layer", "reason")]
        lines += [(cls, str(count), layer, reason) for (cls, layer, reason), count in counts.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip() for line in lines
        )


def kernelization_report(model: nn.Module) -> KernelizationReport:
    """Report on every module of a transformers DeepSeek-V4 class in the model.

    Raises:
        RuntimeError: the installed transformers is not supported.
    """
    by_class = {row.cls: row.layer for row in layer_rows()}
    modules = []
    for name, module in model.named_modules():
        if type(module).__module__ == MODELING and not hasattr(module, "config_class"):
            modules.append(_report(name, module, by_class.get(type(module).__name__)))
    return KernelizationReport(tuple(modules))


def _report(name, module, layer_name):
    cls = type(module).__name__
    if layer_name is None:
        return ModuleReport(name, cls, None, "dsv4 has no layer for this class")
    layer = getattr(layers, layer_name)
    if module_forward(module) is layer.forward:
        return ModuleReport(name, cls, layer_name, "")
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
        return ModuleReport(name, cls, None, "DISABLE_KERNEL_MAPPING is set")
    if module.training and not getattr(layer, "has_backward", True):
        return ModuleReport(name, cls, None, "the layer has no backward and the module is in training mode")
    return ModuleReport(name, cls, None, "not kernelized, or by another kernel")
