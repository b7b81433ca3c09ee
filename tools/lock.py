"""Pin the kernels of a project: write kernels.lock from pyproject.toml and make the cache complete for offline use.

    [tool.kernels.dependencies]
    "org/dsv4" = 1

The lock file is that of `kernels lock` (kernels >= 0.17): one commit per dependency. Two things differ. It also locks
publishers that are not trusted, since you name them yourself; loading them still takes trust_remote_code. And it caches
whole snapshots under the name of their branch, so that afterwards, with HF_HUB_OFFLINE=1, all of these work:

    get_kernel("org/dsv4", version=1)
    get_locked_kernel("org/dsv4", lockfile=Path("kernels.lock"))
    load_kernel("org/dsv4", lockfile=Path("kernels.lock"))

(`kernels download` caches single variants, which huggingface_hub >= 1.22 does not find again when it is offline.)
--fetch caches what an existing kernels.lock names, on a machine that did not write it; there, the last two work.

`kernels` does not verify files when it loads them; --check does. Offline, it compares the cached files with the digest
in each variant's metadata.json, and so finds a changed file but not one whose digest was changed with it; online, it
compares every file with the Hub's checksum. A cache that was changed is not repaired: delete it and run --fetch.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion, Metadata

from .check import digest_problems
from .errors import ToolError, conclude, hub_errors, run

LOCK_FILE = "kernels.lock"


@dataclass
class Report:
    problems: list[str] = field(default_factory=list)  # what was locked is not what would run
    notes: list[str] = field(default_factory=list)  # worth knowing; the lock holds


def lock(project_dir: Path) -> Path:
    """Lock the project's kernels, and the kernels they depend on, to the heads of their branches; cache the snapshots.

    Returns the path of kernels.lock. Raises ToolError if pyproject.toml is missing, unreadable or names no kernels, if
    a repository or version does not exist (says which do), or if the Hub cannot be reached.
    """
    locks = {}
    pending = dependencies(project_dir)
    while pending:
        dependency = pending.pop()
        if dependency not in locks:
            snapshot = _download(dependency)
            locks[dependency] = KernelLock(snapshot.name)
            for variant in _variants(snapshot):
                pending += Metadata.read_from_file(variant / "metadata.json").kernel_depends
    path = Path(project_dir) / LOCK_FILE
    path.write_text(KernelLocks(locks).to_json() + "\n")
    return path


def fetch(project_dir: Path) -> Path:
    """Cache the commits that kernels.lock names, as they are. Returns its path.

    Raises ToolError if there is no readable kernels.lock, a commit is gone or the Hub cannot be reached.
    """
    for dependency, locked in read_lock(project_dir).items():
        _download(dependency, locked.commit)
    return Path(project_dir) / LOCK_FILE


def check_lock(project_dir: Path) -> Report:
    """Compare kernels.lock with pyproject.toml, with the cache and, unless offline, with the Hub.

    Raises ToolError if pyproject.toml or kernels.lock is missing or unreadable.
    """
    report = Report()
    wanted, locked = set(dependencies(project_dir)), read_lock(project_dir)
    report.problems += [f"{_name(d)} is in pyproject.toml but not locked" for d in wanted - set(locked.keys())]
    for dependency, entry in sorted(locked.items(), key=lambda item: _name(item[0])):
        name, snapshot = _name(dependency), _cached(dependency.repo_id, entry.commit)
        if snapshot is None:
            report.problems.append(f"{name} is not completely cached at {entry.commit}; run with --fetch")
        altered = [(path, text) for path in _variants(snapshot) for text in digest_problems(path)] if snapshot else []
        report.problems += [f"{name}: build/{path.name}: {text}" for path, text in altered]
        try:
            with hub_errors(HfApi().endpoint):
                _compare_with_hub(dependency, entry.commit, snapshot, {path.name for path, _ in altered}, report)
        except ToolError as error:
            report.notes.append(f"{name}: compared with the cache only; {error}")
    return report


def dependencies(project_dir: Path) -> list[KernelDependency]:
    """[tool.kernels.dependencies] of the project's pyproject.toml. Raises ToolError if it is missing or wrong."""
    path = Path(project_dir) / "pyproject.toml"
    try:
        table = tomlkit.loads(path.read_text()).unwrap()["tool"]["kernels"]["dependencies"]
    except FileNotFoundError:
        raise ToolError(f"{path} does not exist") from None
    except tomlkit.exceptions.ParseError as error:
        raise ToolError(f"{path}: {error}") from error
    except (KeyError, TypeError):
        raise ToolError(f'{path} has no [tool.kernels.dependencies], such as: "org/dsv4" = 1') from None
    for repo_id, version in table.items():
        if type(version) is not int or version < 0:
            raise ToolError(f"{path}: the version of {repo_id} must be a whole number, got {version!r}")
    return [KernelDependency(repo_id, KernelVersion.Version(version)) for repo_id, version in table.items()]


def read_lock(project_dir: Path) -> KernelLocks:
    """The project's kernels.lock. Raises ToolError if it is missing or not in the format of kernels >= 0.17."""
    path = Path(project_dir) / LOCK_FILE
    try:
        return KernelLocks.from_json(path.read_text())
    except FileNotFoundError:
        raise ToolError(f"{path} does not exist; run python -m tools.lock {project_dir}") from None
    except ValueError as error:
        raise ToolError(f"{path}: {error}") from error


def _download(dependency: KernelDependency, commit: str | None = None) -> Path:
    """Cache the whole snapshot of a dependency and return its folder, which is named after the commit.

    Without `commit`, it is downloaded by branch: only that makes the branch known to the cache.
    """
    api, repo_id, revision = HfApi(), dependency.repo_id, commit or _branch(dependency)
    with hub_errors(api.endpoint):
        try:
            refs = api.list_repo_refs(repo_id, repo_type="kernel")  # also fails fast if there is no Hub
            return Path(api.snapshot_download(repo_id, repo_type="kernel", revision=revision, cache_dir=_cache_dir()))
        except RepositoryNotFoundError:
            raise ToolError(f"the Hub at {api.endpoint} has no kernel repository {repo_id}") from None
        except RevisionNotFoundError:
            there = sorted(int(b.name[1:]) for b in refs.branches if b.name[:1] == "v" and b.name[1:].isdigit())
            raise ToolError(f"{repo_id} has no {revision}; versions: {', '.join(map(str, there)) or 'none'}") from None


def _compare_with_hub(
    dependency: KernelDependency, commit: str, snapshot: Path | None, altered: set[str], report: Report
) -> None:
    """Add to the report what the Hub says about the locked commit; `altered` are variants that it names already."""
    api, repo_id, name, branch = HfApi(), dependency.repo_id, _name(dependency), _branch(dependency)
    heads = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id, repo_type="kernel").branches}
    if heads.get(branch, commit) != commit:
        report.notes.append(f"{name}: the branch has moved on from {commit} to {heads[branch]}")
    if snapshot is None:
        return
    try:
        result = api.verify_repo_checksums(repo_id, repo_type="kernel", revision=commit, cache_dir=_cache_dir())
    except RevisionNotFoundError:
        report.problems.append(f"{name}: the Hub no longer has commit {commit}")
        return
    extra = [path for path in result.extra_paths if not path.endswith(".pyc")]  # loading leaves bytecode behind
    for path in sorted([mismatch["path"] for mismatch in result.mismatches] + extra):
        if not any(path.startswith(f"build/{variant}/") for variant in altered):
            report.problems.append(f"{name}: {path} differs from the Hub")


def _cached(repo_id: str, commit: str) -> Path | None:
    try:
        options = {"repo_type": "kernel", "revision": commit, "cache_dir": _cache_dir(), "local_files_only": True}
        return Path(HfApi().snapshot_download(repo_id, **options))
    except LocalEntryNotFoundError:
        return None


def _variants(snapshot: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(snapshot.glob("build/*/metadata.json")))


def _cache_dir() -> str:
    return os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE  # where `kernels` looks


def _branch(dependency: KernelDependency) -> str:
    match dependency.version:
        case KernelVersion.Version(version):
            return f"v{version}"
        case KernelVersion.Revision(revision):
            return revision


def _name(dependency: KernelDependency) -> str:
    return f"{dependency.repo_id} {_branch(dependency)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project_dir", nargs="?", type=Path, default=Path(), help="with pyproject.toml (default: .)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare kernels.lock with the cache and the Hub")
    action.add_argument("--fetch", action="store_true", help="cache what kernels.lock names; do not write it anew")
    args = parser.parse_args(argv)

    def command() -> int:
        if not args.check:
            print((fetch if args.fetch else lock)(args.project_dir))
            return 0
        report = check_lock(args.project_dir)
        for line in report.notes:
            print(f"note: {line}")
        path = args.project_dir / LOCK_FILE
        return conclude(report.problems, f"{path} does not hold:", f"{path} holds")

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
