"""The import rules of ARCHITECTURE, on the source tree. What the Hub asks for is checked by tools.check."""

import ast
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "torch-ext" / "dsv4"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_ops.py")
OPS = sorted(path.parent.name for path in PACKAGE.glob("*/op.py"))
# Rooms from the top to the bottom; a room imports rooms below it.
ROOMS = ("__init__", "layer_report", "layer_mapping", "layers", "op", "backend", "configs", "common")
LAZY_ONLY = {"kernels", "transformers"}


def room(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    if len(inside.parts) == 1:
        return inside.stem
    if inside.parts[0] == "common":
        return "common"
    return inside.stem if inside.stem in ("op", "configs") else "op" if inside.stem == "__init__" else "backend"


def imports(path: Path, module_level: bool):
    """(level, module, names) of each import statement; at module level only, or in functions only."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and (id(node) not in inside) == module_level:
            if isinstance(node, ast.Import):
                yield from ((0, alias.name, ()) for alias in node.names)
            else:
                yield node.level, node.module or "", tuple(alias.name for alias in node.names)


def test_there_is_something_to_check():
    assert {"rope", "rms_norm"} <= set(OPS) and len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_absolute_imports(path):
    """torch, triton and the standard library; kernels and transformers inside functions of the layers' modules only."""
    for _, module, _ in (found for found in imports(path, module_level=True) if found[0] == 0):
        assert module.partition(".")[0] in sys.stdlib_module_names | {"torch", "triton"}, module
    for _, module, _ in (found for found in imports(path, module_level=False) if found[0] == 0):
        name = module.partition(".")[0]
        assert name in sys.stdlib_module_names | {"torch"} or (name in LAZY_ONLY and room(path).startswith("layer")), module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = room(path)
    for level, module, names in (*imports(path, True), *imports(path, False)):
        if level == 0 or "_ops" in module:
            continue
        folder = path.parent
        for _ in range(level - 1):
            folder = folder.parent
        assert folder.is_relative_to(PACKAGE), "an import leaves the package"
        for target in [module] if module else names:
            found = folder.joinpath(*target.split("."))
            file = found.with_suffix(".py") if found.with_suffix(".py").exists() else found / "__init__.py"
            assert file.exists(), target
            there = room(file)
            if here == "op" and path.name == "__init__.py":
                assert there == "op", f"{path.parent.name}/__init__.py re-exports op.py alone"
                continue
            same_op = file.parent == path.parent and path.parent != PACKAGE
            assert ROOMS.index(there) > ROOMS.index(here) or there == here == "common" or (there == "op" == here), target
            if there in ("backend", "configs"):
                assert same_op, f"ops meet only through op.py: {target}"


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_its_rooms(name):
    files = {path.name for path in (PACKAGE / name).glob("*.py")}
    assert {"__init__.py", "op.py", "reference.py", "triton.py", "configs.py"} <= files
    for backend in ("reference.py", "triton.py"):
        functions = {node.name for node in ast.parse((PACKAGE / name / backend).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert "why_not" in functions, backend


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_no_op_registers_at_import_what_needs_a_gpu():
    """Nothing asks for the device at import: calls into torch.cuda stand inside functions."""
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                source = ast.unparse(node)
                assert "torch.cuda" not in source and "torch.xpu" not in source and "os.environ" not in source, source
