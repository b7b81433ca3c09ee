"""Build the kernel: the tree that kernel-builder makes for [torch-noarch], without nix.

Writes one flat folder per backend of build.toml and the filled Hub card:

    build/CARD.md
    build/torch-<backend>/{__init__.py, ..., _ops.py, metadata.json}

Sources are the files under torch-ext/<name>/ whose extension is in `pyext`. `_ops.py` gives the build an op namespace
of its own, so that several builds load in one process. Two builds of the same clean commit are equal byte for byte.
The new tree is made beside the old one and takes its place at the end: a failed build changes nothing.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import minijinja
import tomlkit
from kernels._rust import Build, Digest, DigestAlgorithm

from .errors import ToolError, run
from .source import public_api

ROOT = Path(__file__).resolve().parents[1]
TOOL = "dsv4 tools/build.py 1"  # in the provenance, where kernel-builder puts its own version
KERNELS_MINVER = "0.14.0"  # what kernel-builder writes for a kernel that depends on no other kernel
TO_THE_HUB = ("build.toml", "CARD.md", "torch-ext", "benchmarks/benchmark*.py")  # all that is built or published
ARCH_KEYS = {"cuda": "cuda_capabilities", "rocm": "rocm_archs"}

OPS_TEMPLATE = '''\
"""The op namespace of this build; no other build has the same. Generated."""

import torch

_OPS_NAME = "{id}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name under which this build registers an op."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


@dataclass(frozen=True)
class GitState:
    commit: str
    tree: str
    dirty: bool


def build(root: Path, out: Path | None = None) -> Path:
    """Build every variant of the kernel repository `root` into `out` (default: root/build) and return `out`.

    Raises ToolError if build.toml is invalid or asks for what this tool does not do, if a source is missing or has no
    literal `__all__`, or if `out` holds anything but a build.
    """
    root = Path(root).resolve()
    out = Path(out).resolve() if out else root / "build"
    config = read_config(root)
    package = root / "torch-ext" / config["general"]["name"].replace("-", "_")
    if not (package / "__init__.py").is_file():
        raise ToolError(f"{package}/__init__.py does not exist")
    if foreign := [p.name for p in (out.iterdir() if out.exists() else ()) if not _is_from_a_build(p)]:
        raise ToolError(f"{out} holds {foreign[0]}, which no build has put there; choose another output folder")
    git = git_state(root)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        (new / "CARD.md").write_text(render_card(root, config, package))
        unique_id = _unique_id(git)
        for backend in config["general"]["backends"]:
            _build_variant(new / f"torch-{backend}", config, package, backend, unique_id, git)
        _swap(new, out, Path(scratch) / "old")
    return out


def read_config(root: Path) -> dict:
    """build.toml as a dict, after the official validator has accepted it. Raises ToolError."""
    try:
        Build.open(root)
    except (ValueError, OSError) as error:
        raise ToolError(" ".join(str(error).split())) from error  # names the folder
    config = tomlkit.loads((root / "build.toml").read_text()).unwrap()
    if "torch-noarch" not in config:
        raise ToolError(f"{root}/build.toml: only [torch-noarch] kernels are built here; use kernel-builder")
    if depends := {"python-depends", "kernel-depends"} & config["general"].keys():
        raise ToolError(f"{root}/build.toml: {depends.pop()} is not supported here; use kernel-builder")
    return config


def git_state(root: Path) -> GitState | None:
    """HEAD of the repository around `root`; None outside git or without a commit.

    Dirty means: a tracked file differs from HEAD, or an untracked file is among those that go to the Hub.
    """

    # In a git hook, GIT_DIR and its like name the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*args: str) -> str:
        options = {"capture_output": True, "text": True, "check": True, "env": environment}
        return subprocess.run(["git", "-C", root, *args], **options).stdout.strip()

    try:
        commit, tree = git("rev-parse", "HEAD", "HEAD^{tree}").split()
        changed = git("status", "--porcelain", "--untracked-files=no")
        untracked = git("ls-files", "--others", "--exclude-standard", "--", *TO_THE_HUB)
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
    return GitState(commit, tree, dirty=bool(changed or untracked))


def render_card(root: Path, config: dict, package: Path) -> str:
    """CARD.md filled with kernel-builder's variables. Raises ToolError if the template is missing or wrong."""
    general = config["general"]
    try:
        repo_id = general["hub"]["repo-id"]
        template = (root / "CARD.md").read_text()
    except (KeyError, FileNotFoundError):
        raise ToolError("the Hub card needs CARD.md and repo-id in [general.hub] of build.toml") from None
    api = public_api(lambda name: (package / name).read_text() if (package / name).is_file() else None)
    environment = minijinja.Environment(trim_blocks=True, keep_trailing_newline=True, undefined_behavior="strict")
    try:
        return environment.render_str(
            template,
            repo_id=repo_id,
            version=general["version"],
            functions=list(api.functions),
            layers=list(api.layers),
            has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
            upstream=general.get("upstream"),
            source=general.get("source"),
            license=general["license"].lower(),
        )
    except minijinja.TemplateError as error:
        raise ToolError(f"CARD.md: {error}") from error


def _build_variant(variant: Path, config: dict, package: Path, backend: str, unique_id: str, git: GitState | None):
    noarch, general = config["torch-noarch"], config["general"]
    extensions = {f".{extension}" for extension in noarch.get("pyext", ["py", "pyi"])}
    for source in sorted(package.rglob("*")):
        if source.is_file() and source.suffix in extensions and "__pycache__" not in source.parts:
            target = variant / source.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    identifier = f"_{package.name}_{backend}_{unique_id}"
    (variant / "_ops.py").write_text(OPS_TEMPLATE.format(id=identifier))

    archs = noarch.get(ARCH_KEYS.get(backend))
    metadata = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
    }
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)  # leaves metadata.json out
    metadata["digest"] = {"algorithm": str(digest.algorithm), "files": dict(sorted(digest.files.items()))}
    metadata["provenance"] = {"kernel-builder": {"version": TOOL}}
    if git:
        metadata["provenance"]["kernel"] = {"commit": git.commit, "dirty": git.dirty}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _unique_id(git: GitState | None) -> str:
    """Named after the content of the commit, so that a rebuild gets the same namespace; random for anything else."""
    if git and not git.dirty:
        return git.tree[:7]
    return secrets.token_hex(4) + ("_dirty" if git else "")


def _is_from_a_build(path: Path) -> bool:
    return path.name == "CARD.md" or (path / "metadata.json").is_file()


def _swap(new: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="kernel repository (default: this one)")
    parser.add_argument("--out", type=Path, help="output folder (default: ROOT/build); a build there is replaced")
    args = parser.parse_args(argv)
    return run(lambda: print(f"built {build(args.root, args.out)}"))


if __name__ == "__main__":
    sys.exit(main())
