"""A small kernel repository in git, to test the tools on: one op, one layer, this repository's build.toml and card."""

import os
import shutil
import subprocess
from pathlib import Path

from tools.build import ROOT, build

SOURCES = {
    "__init__.py": 'from . import layers\nfrom .scale import scale\n\n__all__ = ["layers", "scale"]\n',
    "scale.py": """\
import torch

from ._ops import add_op_namespace_prefix, ops

FACTOR = 1.0


def scale(x):
    return ops.scale(x)


torch.library.define(add_op_namespace_prefix("scale"), "(Tensor x) -> Tensor")
torch.library.impl(add_op_namespace_prefix("scale"), "cpu", lambda x: x * FACTOR)
""",
    "layers.py": """\
from torch import nn


class Linear(nn.Module):
    def forward(self, input):
        return input @ self.weight.T
""",
    "layer_mapping.py": """\
from types import SimpleNamespace


def layer_rows():
    return [SimpleNamespace(module="torch.nn", cls="Linear", key="Linear", layer="Linear")]
""",
    "table.json": "{}\n",
    "notes.txt": "not in pyext\n",
}


class KernelRepo:
    def __init__(self, root: Path):
        self.root, self.package, self.build_dir = root, root / "torch-ext" / "dsv4", root / "build"
        self.package.mkdir(parents=True)
        for name in ("build.toml", "CARD.md", ".gitignore"):
            shutil.copy(ROOT / name, root / name)
        for name, text in SOURCES.items():
            (self.package / name).write_text(text)
        (root / "benchmarks").mkdir()
        (root / "benchmarks" / "benchmark.py").write_text("")
        self.git("init", "-q")
        self.commit()

    def git(self, *args: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", *args]
        options = {"cwd": self.root, "env": environment, "check": True, "capture_output": True, "text": True}
        return subprocess.run(command, **options).stdout

    def edit(self, name: str, old: str, new: str) -> "KernelRepo":
        """Replace text of a file below the root; the text must be there."""
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return self

    def source(self, name: str, old: str, new: str) -> "KernelRepo":
        return self.edit(f"torch-ext/dsv4/{name}", old, new)

    def commit(self) -> "KernelRepo":
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "change")
        return self

    def build(self) -> "KernelRepo":
        build(self.root)
        return self
