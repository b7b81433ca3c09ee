"""tools.build and tools.check, on a small repository and on this one."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from kernels._rust import Digest, Metadata
from kernels.backends import CPU, CUDA, XPU, Metal, ROCm
from kernels.variants import _resolve_variant_for_system, get_variants_local, variants_trace_str
from packaging.version import Version

from kernel_repo import KernelRepo
from tools import build as build_tool
from tools import check as check_tool
from tools.build import build, git_state
from tools.check import check
from tools.errors import ToolError
from tools.source import public_api, source_problems

VARIANTS = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]


@pytest.fixture
def repo(tmp_path) -> KernelRepo:
    return KernelRepo(tmp_path / "kernel")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> KernelRepo:
    return KernelRepo(tmp_path_factory.mktemp("pristine") / "kernel").build()


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def metadata(build_dir: Path, variant: str = "torch-cpu") -> dict:
    return json.loads((build_dir / variant / "metadata.json").read_text())


# Build


def test_one_flat_variant_per_backend(pristine):
    expected = {"__init__.py", "_ops.py", "layer_mapping.py", "layers.py", "metadata.json", "scale.py", "table.json"}
    assert sorted(p.name for p in pristine.build_dir.iterdir()) == ["CARD.md", *VARIANTS]
    for variant in VARIANTS:
        assert set(files(pristine.build_dir / variant)) == expected


def test_metadata(pristine):
    tree = pristine.git("rev-parse", "HEAD^{tree}").strip()
    commit = pristine.git("rev-parse", "HEAD").strip()
    entries = metadata(pristine.build_dir, "torch-rocm")
    assert list(entries) == [
        "name", "id", "version", "kernels-minver", "license", "python-depends", "kernel-depends", "backend", "digest",
        "provenance",
    ]  # fmt: skip
    assert entries["id"] == f"_dsv4_rocm_{tree[:7]}"
    assert entries["backend"] == {"type": "rocm"}
    assert entries["provenance"]["kernel"] == {"commit": commit, "dirty": False}
    parsed = Metadata.read_from_file(pristine.build_dir / "torch-rocm" / "metadata.json")
    parsed.digest.validate(Digest.hash_variant(parsed.digest.algorithm, pristine.build_dir / "torch-rocm"))
    assert "dsv4" in parsed.provenance.kernel_builder.version  # not kernel-builder's own name and version


def test_builds_of_a_commit_are_identical(repo, tmp_path):
    first = files(build(repo.root, tmp_path / "first"))
    (repo.package / "__pycache__").mkdir()
    (repo.package / "__pycache__" / "scale.cpython-311.pyc").write_bytes(b"bytecode")
    repo.git("clone", "-q", ".", str(tmp_path / "clone"))
    assert files(build(repo.root, tmp_path / "second")) == first
    assert files(build(tmp_path / "clone")) == first


@pytest.mark.parametrize(
    ("file", "dirty"),
    [
        ("torch-ext/dsv4/scale.py", True),
        ("torch-ext/dsv4/new.py", True),
        ("benchmarks/benchmark_new.py", True),
        ("benchmarks/sweep.py", False),
        ("new.txt", False),
    ],
)
def test_dirty_means_that_the_build_is_not_the_commit(repo, file, dirty):
    with (repo.root / file).open("a") as stream:
        stream.write("\n")
    entries = metadata(repo.build().build_dir)
    assert entries["provenance"]["kernel"]["dirty"] is dirty
    assert entries["id"].endswith("_dirty") is dirty


def test_outside_git_every_build_has_its_own_namespace(repo, tmp_path):
    shutil.rmtree(repo.root / ".git")
    if git_state(repo.root):
        pytest.skip("the temporary folder lies in a git repository")
    first, second = metadata(build(repo.root, tmp_path / "a")), metadata(build(repo.root, tmp_path / "b"))
    assert first["id"] != second["id"]
    assert "kernel" not in first["provenance"]


def test_failed_build_leaves_the_old_one(repo):
    before = files(repo.build().build_dir)
    names = {path.name for path in repo.root.iterdir()}
    repo.source("__init__.py", '["layers", "scale"]', "sorted(globals())")
    with pytest.raises(ToolError, match="literal"):
        build(repo.root)
    assert files(repo.build_dir) == before
    assert {path.name for path in repo.root.iterdir()} == names


def test_rebuild_replaces_the_old_tree(repo):
    repo.build()
    (repo.package / "table.json").unlink()
    repo.edit("build.toml", ', "xpu"', "").build()
    assert not (repo.build_dir / "torch-xpu").exists()
    assert not (repo.build_dir / "torch-cpu" / "table.json").exists()


def test_output_folder_with_other_things_is_refused(repo, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ToolError, match="holds"):
        build(repo.root, tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("edition = 5", "edition = 5\nedtion = 5", "edtion"),
        ("[torch-noarch]\npyext = [\"py\", \"json\"]", "[torch]\nsrc = []", "only .torch-noarch."),
        ("edition = 5", 'edition = 5\npython-depends = ["einops"]', "python-depends is not supported"),
        ("[general.hub]\nrepo-id = \"org/dsv4\"", "", "repo-id"),
    ],
)  # fmt: skip
def test_wrong_build_toml_is_one_error_line(repo, capsys, old, new, message):
    repo.edit("build.toml", old, new)
    assert build_tool.main([str(repo.root)]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.startswith("error: ") and error.count("\n") == 1


def test_card(pristine):
    card = (pristine.build_dir / "CARD.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert "- `scale`\n" in card and "- `Linear`\n" in card and "- `layers`" not in card
    assert "benchmarks/benchmark.py" in card
    assert "{" not in card
    (snippet,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    ast.parse(snippet)
    assert 'get_kernel("org/dsv4", version=1, trust_remote_code=["org/dsv4"])' in snippet


def test_card_says_nothing_of_what_is_not_there(repo):
    shutil.rmtree(repo.root / "benchmarks")
    repo.source("__init__.py", '["layers", "scale"]', '["scale"]').build()
    card = (repo.build_dir / "CARD.md").read_text()
    assert "Linear" not in card and "## Layers" not in card and "## Benchmarks" not in card


def test_layers_of_a_package_are_public():
    sources = {
        "__init__.py": '__all__ = ["layers", "f"]',
        "layers/__init__.py": "from .norm import RMSNorm\nfrom ..common import Tile\nclass MoE: ...\nclass _Base: ...",
    }
    assert public_api(sources.get).layers == ("RMSNorm", "MoE")
    assert public_api(sources.get).functions == ("f",)


@pytest.mark.parametrize("torch_version", ["2.9", "2.11", "2.13"])
@pytest.mark.parametrize(("os", "cpu"), [("linux", "x86_64"), ("linux", "aarch64"), ("windows", "x86_64")])
@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        (CPU(), "torch-cpu"),
        (CUDA(Version("12.6")), "torch-cuda"),
        (CUDA(Version("13.0")), "torch-cuda"),
        (ROCm(Version("7.0")), "torch-rocm"),
        (XPU(Version("2025.3")), "torch-xpu"),
        (Metal(), None),
    ],
    ids=str,
)
def test_every_torch_has_a_variant(pristine, backend, variant, os, cpu, torch_version):
    variants = get_variants_local(pristine.build_dir)
    cxx11_abi = True if os == "linux" else None
    found, trace = _resolve_variant_for_system(variants, backend, cpu, os, Version(torch_version), cxx11_abi, None)
    assert [v.variant_str for v in found] == ([variant] if variant else [])
    reasons = variants_trace_str(trace)
    assert all(name == variant or f"{name}: backend" in reasons for name in VARIANTS)


# Check


def test_a_good_build_has_no_problems(pristine):
    assert check(pristine.build_dir, pristine.root) == []


def test_this_kernel_has_no_problems(built):
    assert check(built / "build") == []


OP_MODULE = "import torch\nfrom ._ops import add_op_namespace_prefix\n"


@pytest.mark.parametrize(
    "source",
    [
        OP_MODULE + '@torch.library.custom_op(add_op_namespace_prefix("f"), mutates_args=())\ndef f(x): ...',
        OP_MODULE + 'torch.library.define(add_op_namespace_prefix("f"), "() -> ()")',
        "def f():\n    import kernels, transformers.models",
        "import json, torch.nn.functional as F\nfrom triton import language as tl\nfrom . import g",
        "import argparse\nparser.define('x')",
        "g: int = 1\nimport os.path\n__all__ = ['g', 'os']",
    ],
)
def test_source_rules_accept(source):
    assert source_problems("f.py", source) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (OP_MODULE + 'torch.library.define("dsv4::f", "() -> ()")', "3: torch.library.define"),
        (OP_MODULE + '@torch.library.custom_op("dsv4::f")\ndef f(x): ...', "3: torch.library.custom_op"),
        ('from torch.library import register_fake as fake\nfake("f")', "2: torch.library.register_fake"),
        ('from torch import library\nlibrary.impl(name("f"), "cpu", g)', "2: torch.library.impl"),
        ('import torch.library as tl\ntl.triton_op(qualname="f")', "2: torch.library.triton_op"),
        ('import torch\nlib = torch.library.Library("dsv4", "DEF")', "2: torch.library.Library"),
        ("def prefix(name):\n    return add_op_namespace_prefix(name)", "2: add_op_namespace_prefix"),
        ('add_op_namespace_prefix(f"{x}_y")', "1: add_op_namespace_prefix"),
        ("import einops", "1: imports einops"),
        ("def f():\n    from dsv4.rope import g", "2: imports dsv4.rope"),
        ("try:\n    import kernels\nexcept ImportError: ...", "2: kernels may be imported inside functions only"),
        ("class A:\n    from transformers import B", "2: transformers may be imported inside functions only"),
        ("from .. import f", "1: relative import leaves the package"),
        ("__all__ = ['f']", "f is in __all__ but is not defined"),
        ("f = 1\n__all__ = ('f',)", "__all__ is not one literal list"),
        ("f = 1\n__all__ = ['f']\n__all__ += g.__all__", "__all__ is not one literal list"),
        ("def f(:", "1: invalid syntax"),
    ],
)
def test_source_rules_refuse(source, message):
    (problem,) = source_problems("f.py", source)
    assert message in problem


def test_init_needs_all():
    assert source_problems("__init__.py", "x = 1") == ["__init__.py:1: no __all__ in __init__.py"]


def _edit_metadata(**changes):
    def damage(variant: Path):
        path = variant / "metadata.json"
        entries = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))

    return damage


def _replace_xpu(variant: Path):
    shutil.copytree(variant, variant.with_name("torch-xpu"), dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "variant is missing"),
        (lambda variant: (variant / "__init__.py").unlink(), "no __init__.py"),
        (lambda variant: (variant / "metadata.json").unlink(), "No such file"),
        (lambda variant: (variant / "scale.pyc").write_bytes(b""), "holds bytecode, scale.pyc"),
        (lambda variant: (variant / "dsv4").mkdir(), "second package"),
        (lambda variant: (variant / "scale.py").write_text("FACTOR = 2.0"), "scale.py"),
        (lambda variant: (variant / "more.json").write_text("{}"), "more.json"),
        (lambda variant: (variant / "table.json").unlink(), "table.json"),
        (lambda variant: variant.rename(variant.with_name("torch-gpu9")), "torch-gpu9: not a backend of build.toml"),
        (lambda variant: variant.rename(variant.with_name("gpu")), "gpu: "),
        (_replace_xpu, "that of torch-cpu"),
        (_edit_metadata(digest=None), "no digest"),
        (_edit_metadata(version=2), "is dsv4 2, build.toml says dsv4 1"),
        (_edit_metadata(id="_dsv4_cuda_0123456"), "does not begin with _dsv4_cpu_"),
        (_edit_metadata(backend={"type": "abacus"}), "abacus"),
    ],
)
def test_damage_is_named(pristine, tmp_path, damage, message):
    shutil.copytree(pristine.build_dir, tmp_path / "build")
    damage(tmp_path / "build" / "torch-cpu")
    problems = check(tmp_path / "build", pristine.root)
    assert any(message in problem for problem in problems), problems


def test_kernel_that_raises_at_import(repo):
    repo.source("scale.py", "FACTOR = 1.0", 'raise OSError("no such card")').build()
    (problem,) = check(repo.build_dir, repo.root)
    assert problem.startswith("does not load: ") and "no such card" in problem


def test_layers_are_compared_with_the_classes_they_replace(repo):
    (repo.package / "layers.py").write_text(
        "from torch import nn\n"
        "class Good(nn.Module):\n    has_backward = False\n    def forward(self, x): ...\n"
        "class Member(nn.Module):\n    eps = 1\n    def forward(self, x): ...\n"
        "class Count(nn.Module):\n    def forward(self, x, y): ...\n"
        "class Kind(nn.Module):\n    def forward(self, *x): ...\n"
        "class State(nn.Module):\n    def __init__(self): ...\n    def forward(self, x): ...\n"
    )
    rows = ", ".join(
        f'SimpleNamespace(module="torch.nn", cls="Linear", key="Linear", layer="{name}")'
        for name in ("Good", "Member", "Count", "Kind", "State", "Missing")
    )
    (repo.package / "layer_mapping.py").write_text(
        f"from types import SimpleNamespace\ndef layer_rows():\n    return [{rows}]\n"
    )
    problems = check(repo.build().build_dir, repo.root)
    names = ["Member", "Count", "Kind", "State", "Missing"]
    assert [re.match(r"layers\.(\w+)", problem)[1] for problem in problems] == names


def test_unsupported_transformers_is_not_a_pass(repo):
    mapping = repo.package / "layer_mapping.py"
    mapping.write_text('def layer_rows():\n    raise RuntimeError("transformers is too old")\n')
    assert check(repo.build().build_dir, repo.root) == ["layers are not checked: transformers is too old"]


def test_command_line(pristine, tmp_path, capsys):
    root = ["--root", str(pristine.root)]
    assert check_tool.main([str(pristine.build_dir), *root]) == 0
    assert check_tool.main([str(tmp_path), *root]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {tmp_path} has 4 problem(s)"
