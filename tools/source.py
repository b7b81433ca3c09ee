"""What the sources of a kernel say without being run: the public names, and breaches of the Hub's rules."""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolError

IMPORTS = frozenset(sys.stdlib_module_names) | {"torch", "triton"}
IMPORTS_IN_FUNCTIONS = IMPORTS | {"kernels", "transformers"}  # nothing that loads the kernel may need these
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Calls of torch.library whose first argument names an op. `Library` takes a whole namespace and is refused as well.
NAMES_AN_OP = {
    "Library", "custom_op", "triton_op", "define", "impl", "impl_abstract", "register_autocast", "register_autograd",
    "register_fake", "register_kernel", "register_torch_dispatch", "register_vmap",
}  # fmt: skip


@dataclass(frozen=True)
class Api:
    """The public names of one variant, as its sources declare them."""

    functions: tuple[str, ...]
    layers: tuple[str, ...]


def literal_all(source: str) -> list[str]:
    """The `__all__` of a module. Raises ToolError unless it is one list of string literals: tools read it as text."""
    values = []
    for node in _parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            values.append(node.value)
    if not values:
        raise ToolError("no __all__ in __init__.py")
    match values:
        case [ast.List(elts=elements)] if all(isinstance(getattr(e, "value", None), str) for e in elements):
            return [element.value for element in elements]
    raise ToolError("__all__ is not one literal list of strings")


def public_api(read: Callable[[str], str | None]) -> Api:
    """Public functions and layers of a variant, by syntax alone.

    `read` returns the text of a file of the variant, or None if there is none. Layers are the public classes of
    layers.py or layers/__init__.py, and what the latter re-exports. Raises ToolError without a literal `__all__`.
    """
    names = literal_all(read("__init__.py") or "")
    layers = []
    package = read("layers/__init__.py")
    if "layers" in names:
        for node in _parse(package or read("layers.py") or "").body:
            if isinstance(node, ast.ClassDef):
                layers.append(node.name)
            elif isinstance(node, ast.ImportFrom) and node.level == 1 and package:
                layers += [alias.asname or alias.name for alias in node.names]
    layers = [name for name in layers if name[0].isupper()]
    return Api(tuple(name for name in names if name != "layers"), tuple(layers))


def source_problems(path: str, source: str) -> list[str]:
    """Problems of one file of the package, by syntax: op names, imports and `__all__`. `path` is relative to it."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    problems = [*_op_name_problems(tree), *_import_problems(tree, depth=len(Path(path).parts))]
    if path == "__init__.py" or "__all__" in _top_level_names(tree):
        try:
            missing = set(literal_all(source)) - _top_level_names(tree)
            problems += [(1, f"{name} is in __all__ but is not defined") for name in sorted(missing)]
        except ToolError as error:
            problems.append((1, str(error)))
    return [f"{path}:{line}: {problem}" for line, problem in problems]


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ToolError(f"line {error.lineno}: {error.msg}") from error


def _op_name_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    full_names = {}  # what a name of this file stands for: {"library": "torch.library"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full_names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else None
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full_name(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        return (full_names.get(node.id) or node.id) if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        module, _, function = full_name(node.func).rpartition(".")
        if module == "torch.library" and function in NAMES_AN_OP and not (node.args and _is_prefix_call(node.args[0])):
            yield node.lineno, f'torch.library.{function} must be given add_op_namespace_prefix("name") itself'
        elif function == "add_op_namespace_prefix" and not _is_prefix_call(node):
            yield node.lineno, "add_op_namespace_prefix must be called with one string literal, not wrapped"


def _is_prefix_call(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="add_op_namespace_prefix"), args=[ast.Constant(value=str())], keywords=[]):
            return True
    return False


def _import_problems(tree: ast.Module, depth: int) -> Iterator[tuple[int, str]]:
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    in_functions = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > depth:
                yield node.lineno, "relative import leaves the package"
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        else:
            continue
        for module in modules:
            top_level = module.partition(".")[0]
            if top_level in IMPORTS_IN_FUNCTIONS - IMPORTS and node not in in_functions:
                yield node.lineno, f"{module} may be imported inside functions only"
            elif top_level not in IMPORTS_IN_FUNCTIONS:
                yield node.lineno, f"imports {module}; only the standard library, torch and triton are there for users"


def _top_level_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names
