"""Check a build before it is published: what kernel-builder's hooks check, and what only shows when it is loaded.

By reading: the layout and metadata of every variant, digests, op names, `__all__`, imports.
In a fresh process: the variant for this machine loads, its public names are there, and every layer fits the class of
the installed transformers that it replaces.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kernels._rust import Digest, DigestValidationError, Metadata
from kernels.variants import parse_variant

from .build import ROOT, read_config
from .errors import ToolError, conclude, run
from .source import source_problems


def check(build_dir: Path, root: Path = ROOT) -> list[str]:
    """Every problem of the build, one line each; an empty list means that it can be published.

    `root` is the kernel repository whose build.toml says which variants there must be. Raises ToolError if build.toml
    is invalid.
    """
    build_dir = Path(build_dir).resolve()
    general = read_config(root)["general"]
    wanted = {f"torch-{backend}" for backend in general["backends"]}
    present = {path.name for path in build_dir.iterdir() if path.is_dir()} if build_dir.is_dir() else set()
    problems = [f"{name}: variant is missing" for name in sorted(wanted - present)]
    problems += [f"{name}: not a backend of build.toml" for name in sorted(present - wanted) if _is_noarch(name)]
    seen: set[tuple[Path, bytes]] = set()  # the variants share their sources; report each problem once
    for name in sorted(present):
        problems += [f"{name}: {problem}" for problem in _variant_problems(build_dir / name, general)]
        problems += [f"{name}/{problem}" for problem in _package_problems(build_dir / name, seen)]
    return problems or _load_problems(build_dir)


def digest_problems(variant: Path) -> list[str]:
    """How the files of a variant differ from the digest in its metadata.json."""
    try:
        digest = Metadata.read_from_file(variant / "metadata.json").digest
        if digest is None:
            return ["metadata.json has no digest"]
        digest.validate(Digest.hash_variant(digest.algorithm, variant))
    except DigestValidationError as error:
        return [str(violation) for violation in error.violations]
    except (ValueError, OSError) as error:
        return [" ".join(str(error).split())]
    return []


def _variant_problems(variant: Path, general: dict) -> Iterator[str]:
    try:
        parse_variant(variant.name)
    except ValueError as error:
        yield str(error)
    module = general["name"].replace("-", "_")
    if not (variant / "__init__.py").is_file():
        yield "no __init__.py"
    if (variant / module).exists():
        yield f"holds a second package, {module}/"
    if bytecode := sorted(variant.rglob("*.pyc")):
        yield f"holds bytecode, {bytecode[0].relative_to(variant)}"
    yield from digest_problems(variant)
    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
    except (ValueError, OSError):
        return  # digest_problems has said so
    if (str(metadata.name), metadata.version) != (general["name"], general["version"]):
        yield f"is {metadata.name} {metadata.version}, build.toml says {general['name']} {general['version']}"
    backend = metadata.backend.backend_type
    if _is_noarch(variant.name) and variant.name != f"torch-{backend}":
        yield f"its metadata is that of torch-{backend}"
    if not metadata.id.startswith(f"_{module}_{backend}_"):
        yield f"id {metadata.id} does not begin with _{module}_{backend}_"


def _is_noarch(variant_name: str) -> bool:
    """torch-<backend>, as opposed to the name of a compiled variant, which has the versions it was compiled for."""
    return variant_name.count("-") == 1


def _package_problems(variant: Path, seen: set[tuple[Path, bytes]]) -> Iterator[str]:
    for path in sorted(variant.rglob("*.py")):
        relative = path.relative_to(variant)
        if (key := (relative, path.read_bytes())) not in seen:
            seen.add(key)
            yield from source_problems(relative.as_posix(), path.read_text())


def _load_problems(build_dir: Path) -> list[str]:
    """Run `_probe` in a fresh interpreter, as a user's would be: no network, no override, no bytecode left behind."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("LOCAL_KERNELS", None)
    code = "import sys; from tools.check import _probe; _probe(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(build_dir)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if result.returncode:
        return [f"the process that loads it died: {(result.stderr.strip() or 'no message').splitlines()[-1]}"]
    return json.loads(result.stdout.splitlines()[-1])


def _probe(build_dir: str) -> None:
    from kernels import get_local_kernel

    try:
        kernel = get_local_kernel(Path(build_dir))
    except Exception as error:  # whatever the kernel raises is the finding
        print(json.dumps([f"does not load: {type(error).__name__}: {error}"]))
        return
    missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]
    problems = [f"{name} is in __all__ but not in the loaded kernel" for name in missing]
    if "layers" in kernel.__all__:
        problems += _layer_problems(kernel)
    print(json.dumps(problems))


def _layer_problems(kernel) -> Iterator[str]:
    import importlib

    from kernels.layer.layer import _validate_layer  # the check that kernelize does, not a copy of it

    try:
        rows = list(importlib.import_module(f"{kernel.__name__}.layer_mapping").layer_rows())
    except (ImportError, RuntimeError) as error:
        yield f"layers are not checked: {error}"
        return
    for row in rows:
        layer = getattr(kernel.layers, row.layer, None)
        if layer is None:
            yield f"layers.{row.layer} is mapped to {row.key} but does not exist"
            continue
        try:
            host = getattr(importlib.import_module(row.module), row.cls)
            _validate_layer(check_cls=host, cls=layer, repo=f"layers.{row.layer}")
        except (ImportError, AttributeError, TypeError) as error:
            yield f"layers.{row.layer} for {row.cls}: {error}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build_dir", nargs="?", type=Path, default=ROOT / "build", help="default: this repository's")
    parser.add_argument("--root", type=Path, default=ROOT, help="kernel repository with build.toml (default: this one)")
    args = parser.parse_args(argv)

    path = args.build_dir
    return run(lambda: conclude(check(path, args.root), f"{path} has", f"{path} is fine"))


if __name__ == "__main__":
    sys.exit(main())
