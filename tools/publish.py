"""Publish a build to a kernel repository on the Hub: its card to `main`, its variants to branch `v<version>`.

What a user of `get_kernel(..., version=N)` runs is whatever branch vN holds, so the tool refuses, before it writes:
  - a working tree or a build that is not a clean commit, or a build of another commit than HEAD;
  - files that differ from the digest in their metadata.json, variants of several versions, a version that is not
    build.toml's;
  - an upload after which branch vN would lack a public function or layer that it offers now: that takes a new version.
Publishing what is there already changes nothing. Files of an uploaded variant that the new build no longer has are
removed; other variants on the branch, and other branches, are left alone.

On huggingface.co this takes: a namespace for which "Kernels Creation" was requested and granted, and a token with write
access to it (`hf auth login`, or HF_TOKEN). Until the namespace is a trusted publisher, users must pass
trust_remote_code=["<repo>"]. For another Hub, such as `python -m tools.loopback_hub`, set HF_ENDPOINT, any HF_TOKEN,
and HF_HUB_DISABLE_XET=1.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from kernels._rust import Metadata

from .build import ROOT, git_state, read_config
from .check import digest_problems
from .errors import ToolError, hub_errors, run
from .source import Api, public_api

KERNEL = "kernel"  # the Hub's repository type
OPERATIONS_PER_COMMIT = 1000
MESSAGE = "Upload kernel build"


@dataclass(frozen=True)
class Published:
    repo_id: str
    branch: str
    commit: str
    changed: bool  # False: everything was there already

    def __str__(self) -> str:
        if self.changed:
            return f"published {self.repo_id} {self.branch} at {self.commit}"
        return f"nothing to do: {self.repo_id} {self.branch} already holds this build, at {self.commit}"


def publish(
    root: Path,
    build_dir: Path | None = None,
    *,
    repo_id: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    allow_dirty: bool = False,
) -> Published:
    """Publish the build in `build_dir` (default: root/build) of the kernel repository `root`.

    Args:
        repo_id: default: `repo-id` of build.toml.
        endpoint, token: default: HF_ENDPOINT and the token that huggingface_hub finds.
        allow_dirty: skip the git rules, to rehearse; for a Hub on this machine only.

    Raises ToolError for each refusal listed in the module's docstring, and if the Hub cannot be reached or says no.
    """
    root = Path(root).resolve()
    build_dir = Path(build_dir).resolve() if build_dir else root / "build"
    general = read_config(root)["general"]
    built_for = general.get("hub", {}).get("repo-id")  # which the card names
    if not built_for:
        raise ToolError(f"{root}/build.toml has no repo-id in [general.hub]")
    repo_id = repo_id or built_for
    api = HfApi(endpoint=endpoint, token=token)
    if allow_dirty and urlsplit(api.endpoint).hostname not in ("127.0.0.1", "localhost"):
        raise ToolError(f"only a Hub on this machine takes an uncommitted build, {api.endpoint} does not")
    variants = _verified_variants(build_dir, general["version"])
    if not allow_dirty:
        _require_clean_commit(root, variants)
    branch = f"v{general['version']}"
    card = (build_dir / "CARD.md").read_text().replace(built_for, repo_id)
    folders = [folder for folder, _ in variants]
    files = {f"build/{path.relative_to(build_dir).as_posix()}": path for path in _variant_files(variants)}
    files |= {f"benchmarks/{path.name}": path for path in sorted((root / "benchmarks").glob("benchmark*.py"))}
    with hub_errors(api.endpoint):
        before = _heads(api, repo_id)
        if branch in before:
            _refuse_lost_names(api, repo_id, before[branch], folders)
        if not before:
            api.create_repo(repo_id, repo_type=KERNEL, exist_ok=True)
        heads = before or _heads(api, repo_id)
        changed = _publish_card(api, repo_id, general["version"], heads, card)
        if branch in before:
            replaced = (*(f"build/{folder.name}/" for folder in folders), "benchmarks/benchmark")
        else:  # a new branch starts as a copy of main, which may hold an old build
            api.create_branch(repo_id, branch=branch, repo_type=KERNEL)
            heads = _heads(api, repo_id)
            replaced = ("build/", "benchmarks/")
        commit = _publish_files(api, repo_id, branch, heads[branch], files, replaced)
    return Published(repo_id, branch, commit, changed or commit != before.get(branch))


def _verified_variants(build_dir: Path, version: int) -> list[tuple[Path, Metadata]]:
    folders = sorted(path.parent for path in build_dir.glob("*/metadata.json"))
    if not folders or not (build_dir / "CARD.md").is_file():
        raise ToolError(f"{build_dir} holds no build; run python -m tools.build")
    variants = []
    for folder in folders:
        if problems := digest_problems(folder):
            raise ToolError(f"{folder.name} is not what was built: {'; '.join(problems)}")
        variants.append((folder, Metadata.read_from_file(folder / "metadata.json")))
    versions = {metadata.version for _, metadata in variants}
    if len(versions) > 1:
        raise ToolError(f"the variants are of versions {', '.join(map(str, sorted(versions)))}; build them together")
    if versions != {version}:
        raise ToolError(f"the build is of version {versions.pop()}, build.toml says {version}; build again")
    return variants


def _require_clean_commit(root: Path, variants: Iterable[tuple[Path, Metadata]]) -> None:
    git = git_state(root)
    if git is None:
        raise ToolError(f"{root} is not a git commit; only commits are published")
    if git.dirty:
        raise ToolError(f"{root} has changes that are not committed; commit, build and publish again")
    for folder, metadata in variants:
        source = metadata.provenance and metadata.provenance.kernel
        if source is None or metadata.provenance.dirty:
            raise ToolError(f"{folder.name} was not built from a clean commit; build again")
        if source.commit != git.commit:
            raise ToolError(f"{folder.name} is of commit {source.commit[:9]}, HEAD is {git.commit[:9]}; build again")


def _variant_files(variants: Iterable[tuple[Path, Metadata]]) -> Iterable[Path]:
    """What the digest covers, the metadata that holds it and its signature: nothing else that lies in the folder."""
    for folder, metadata in variants:
        yield from (folder / name for name in sorted(metadata.digest.files))
        yield folder / "metadata.json"
        yield from folder.glob("metadata.json.sigstore")


def _heads(api: HfApi, repo_id: str) -> dict[str, str]:
    """Branch -> commit; empty for a repository that does not exist yet."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type=KERNEL)
    except RepositoryNotFoundError:
        return {}
    return {branch.name: branch.target_commit for branch in refs.branches}


def _refuse_lost_names(api: HfApi, repo_id: str, commit: str, folders: Iterable[Path]) -> None:
    present = set(api.list_repo_files(repo_id, repo_type=KERNEL, revision=commit))
    lost = set()
    with tempfile.TemporaryDirectory() as cache:  # the user's cache must not get an incomplete snapshot from here

        def published(path: str) -> str | None:
            if path not in present:
                return None
            options = {"repo_type": KERNEL, "revision": commit, "cache_dir": cache}
            return Path(api.hf_hub_download(repo_id, path, **options)).read_text()

        for folder in folders:
            if f"build/{folder.name}/__init__.py" in present:
                try:
                    old = public_api(lambda name: published(f"build/{folder.name}/{name}"))
                except ToolError as error:
                    raise ToolError(f"cannot tell what users of {repo_id} have now: {error}; bump version") from error
                new = public_api(lambda name: (folder / name).read_text() if (folder / name).is_file() else None)
                lost |= _names(old) - _names(new)
    if lost:
        raise ToolError(
            f"users of {repo_id} would lose {', '.join(sorted(lost))}; keep them, or bump version in build.toml"
        )


def _names(api: Api) -> set[str]:
    return {*api.functions, *(f"layers.{name}" for name in api.layers)}


def _publish_card(api: HfApi, repo_id: str, version: int, heads: dict[str, str], card: str) -> bool:
    """Put the card on `main`, unless a newer version has put its own there. Returns whether main changed."""
    if any(name[:1] == "v" and name[1:].isdigit() and int(name[1:]) > version for name in heads):
        return False
    operations = [CommitOperationAdd("README.md", card.encode())]
    commit = api.create_commit(repo_id, operations, repo_type=KERNEL, revision="main", commit_message=MESSAGE)
    return commit.oid != heads.get("main")


def _publish_files(api: HfApi, repo_id: str, branch: str, head: str, files: dict[str, Path], replaced: tuple) -> str:
    """Make the part of the branch under the prefixes `replaced` equal to `files`. Returns the new head.

    Files that are there already are no operation, so that nothing changes if all are. `parent_commit` makes the Hub
    refuse if somebody else has published since `head` was read.
    """
    present = api.list_repo_files(repo_id, repo_type=KERNEL, revision=head)
    operations = [CommitOperationAdd(path, local) for path, local in files.items()]
    operations += [CommitOperationDelete(path) for path in present if path.startswith(replaced) and path not in files]
    for start in range(0, len(operations), OPERATIONS_PER_COMMIT):
        options = {"repo_type": KERNEL, "revision": branch, "parent_commit": head, "commit_message": MESSAGE}
        head = api.create_commit(repo_id, operations[start : start + OPERATIONS_PER_COMMIT], **options).oid
    return head


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="kernel repository (default: this one)")
    parser.add_argument("--build-dir", type=Path, help="what to publish (default: ROOT/build)")
    parser.add_argument("--repo-id", help="where to (default: repo-id of build.toml)")
    parser.add_argument("--allow-dirty", action="store_true", help="skip the git rules; for a Hub on this machine only")
    args = parser.parse_args(argv)
    options = {"repo_id": args.repo_id, "allow_dirty": args.allow_dirty}
    return run(lambda: print(publish(args.root, args.build_dir, **options)))


if __name__ == "__main__":
    sys.exit(main())
