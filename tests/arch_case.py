"""One specialisation of a kernel, for compiling it without a GPU: argument types, constants, divisibility."""

import importlib
import pkgutil
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ArchCase:
    """One specialisation. `types` gives Triton types by argument name; other runtime arguments are i32.

    `constants` are constexprs and arguments that are 1 or None; `any` are integers that are not multiples of 16; any other
    runtime argument is one.
    """

    name: str
    module: str
    kernel: str
    types: dict
    constants: dict
    num_warps: int = 4
    any: frozenset = field(default=frozenset())
    archs: frozenset = field(default=frozenset())  # names of test_compile_archs' targets that choose it; empty: all
    options: dict = field(default_factory=dict)  # further compiler options, such as num_stages or maxnreg

    def specialise(self, kernel, arch):
        constants = {**self.constants, "PDL": isinstance(arch, int) and arch >= 90}
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
                continue
            signature[name] = self.types.get(name, "i32")
            if signature[name] != "fp32" and name not in self.any:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return signature, {name: value for name, value in constants.items() if name in kernel.arg_names}, attributes


def jit_functions(package, entry_points: bool) -> set:
    """(module, name) of the kernels in the package: jit functions that take pointers are entry points."""
    from triton.runtime import JITFunction

    found = set()
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.__module__ == info.name:
                if not entry_points or any(argument.endswith("_ptr") for argument in value.arg_names):
                    found.add((info.name.removeprefix(f"{package.__name__}."), name))
    return found


def tl():
    import triton.language

    return triton.language
