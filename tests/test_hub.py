"""The kernel's life on a Hub: publish, load, pin, go offline. Fresh processes against the loopback Hub, over HTTP."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from kernels._rust import KernelLocks

from kernel_repo import KernelRepo
from tools import publish as publish_tool
from tools.build import ROOT
from tools.errors import ToolError
from tools.loopback_hub import serve
from tools.publish import publish

TRUSTED = "trusted"
NOBODY = "http://127.0.0.1:9"  # the discard port, where nothing listens


class Hub:
    """A loopback Hub and a user's machine: commands run in fresh processes with an HF_HOME of their own."""

    def __init__(self, endpoint: str, home: Path):
        self.endpoint, self.home, self.api = endpoint, home, HfApi(endpoint=endpoint, token="hf_x")

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        overrides = ("LOCAL_KERNELS", "KERNELS_CACHE")
        variables = {name: value for name, value in os.environ.items() if name not in overrides}
        variables |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.home), "HF_TOKEN": "hf_x"}
        variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *command]
        options = {"cwd": ROOT, "env": variables | environment, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(command, **options)

    def python(self, code: str, **environment: str):
        """Run code that calls `answer(value)`, and return the value."""
        prelude = "import json\nfrom pathlib import Path\nanswer = lambda value: print('ANSWER', json.dumps(value))\n"
        result = self.run("-c", prelude + code, **environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.rpartition("ANSWER ")[2])

    def publish(self, repo: KernelRepo, repo_id: str, *options: str) -> str:
        result = self.run("-m", "tools.publish", str(repo.root), "--repo-id", repo_id, *options)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def lock(self, project: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
        return self.run("-m", "tools.lock", str(project), *options, **environment)

    def heads(self, repo_id: str) -> dict[str, str]:
        return {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo_id, repo_type="kernel").branches}

    def files(self, repo_id: str, revision: str) -> set[str]:
        return set(self.api.list_repo_files(repo_id, repo_type="kernel", revision=revision))

    def read(self, repo_id: str, path: str, revision: str, cache: Path) -> str:
        options = {"repo_type": "kernel", "revision": revision, "cache_dir": cache}
        return Path(self.api.hf_hub_download(repo_id, path, **options)).read_text()


def error_line(result: subprocess.CompletedProcess) -> str:
    """The one line of a refusal: exit code 1, nothing else on stderr."""
    assert result.returncode == 1, result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def project(folder: Path, **versions: int) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f'"org/{name}" = {version}' for name, version in versions.items()]
    (folder / "pyproject.toml").write_text("\n".join(["[tool.kernels.dependencies]", *lines, ""]))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with serve(folder / "store", trusted=[TRUSTED]) as endpoint:
        yield Hub(endpoint, folder / "home")


@pytest.fixture
def repo(tmp_path) -> KernelRepo:
    return KernelRepo(tmp_path / "kernel").build()


@pytest.fixture(scope="module")
def versions(hub, tmp_path_factory) -> dict:
    """org/versions: v1 multiplies by 1, v2 by 2. The heads and the card of main after each step."""
    folder = tmp_path_factory.mktemp("versions")
    repo, seen = KernelRepo(folder / "kernel").build(), {}
    steps = {"v1": None, "v2": ("version = 1", "version = 2"), "v1 again": ("version = 2", "version = 1")}
    for step, edit in steps.items():
        if edit:
            repo.edit("build.toml", *edit)
            repo.source("scale.py", *(("1.0", "2.0") if step == "v2" else ("2.0", "1.0"))).commit().build()
        hub.publish(repo, "org/versions")
        heads = hub.heads("org/versions")
        seen[step] = heads, hub.read("org/versions", "README.md", heads["main"], folder / "cache")
    return seen


# Publish


def test_publish_puts_the_card_on_main_and_the_build_on_the_version_branch(hub, repo, tmp_path):
    (repo.build_dir / "torch-cpu" / "__pycache__").mkdir()
    (repo.build_dir / "torch-cpu" / "__pycache__" / "scale.pyc").write_bytes(b"left by a test run")
    commit = re.search(r"published org/first v1 at ([0-9a-f]{40})", hub.publish(repo, "org/first"))[1]
    assert hub.heads("org/first")["v1"] == commit
    card = (repo.build_dir / "CARD.md").read_text()
    assert hub.read("org/first", "README.md", "main", tmp_path) == card.replace("org/dsv4", "org/first") != card
    names = {"__init__.py", "_ops.py", "layer_mapping.py", "layers.py", "metadata.json", "scale.py", "table.json"}
    expected = {f"build/torch-{backend}/{name}" for backend in ("cpu", "cuda", "rocm", "xpu") for name in names}
    assert hub.files("org/first", "main") == {"README.md"}
    assert hub.files("org/first", "v1") == expected | {"README.md", "benchmarks/benchmark.py"}


def test_publishing_twice_changes_nothing(hub, repo):
    hub.publish(repo, "org/twice")
    before = hub.heads("org/twice")
    assert "nothing to do: org/twice v1 already holds this build" in hub.publish(repo, "org/twice")
    assert hub.heads("org/twice") == before


def test_stale_files_go_and_other_variants_stay(hub, repo):
    hub.publish(repo, "org/stale")
    compiled = "build/torch-stable-abi211-cu130-x86_64-linux/__init__.py"
    addition = [CommitOperationAdd(compiled, b"")]
    hub.api.create_commit("org/stale", addition, commit_message="compiled", repo_type="kernel", revision="v1")
    before = hub.files("org/stale", "v1")
    (repo.package / "table.json").unlink()
    (repo.root / "benchmarks" / "benchmark.py").rename(repo.root / "benchmarks" / "benchmark_scale.py")
    hub.publish(repo.commit().build(), "org/stale")
    after = hub.files("org/stale", "v1")
    gone = {f"build/torch-{backend}/table.json" for backend in ("cpu", "cuda", "rocm", "xpu")}
    assert before - after == gone | {"benchmarks/benchmark.py"}
    assert after - before == {"benchmarks/benchmark_scale.py"}
    assert compiled in after


def test_a_new_version_leaves_the_old_one_alone(versions):
    (first, _), (second, card), (third, last_card) = versions.values()
    assert second["v1"] == first["v1"] and second["v2"] not in first.values()
    assert third["v2"] == second["v2"]
    assert "version=2" in card
    assert last_card == card and third["main"] == second["main"], "main shows the card of the newest version"


def test_many_files_take_several_commits(hub, repo, monkeypatch):
    monkeypatch.setattr(publish_tool, "OPERATIONS_PER_COMMIT", 10)
    publish(repo.root, repo_id="org/many", endpoint=hub.endpoint, token="hf_x")
    assert len(hub.files("org/many", "v1")) == 4 * 7 + 2
    assert publish(repo.root, repo_id="org/many", endpoint=hub.endpoint, token="hf_x").changed is False


def test_somebody_else_publishes_at_the_same_time(hub, repo, monkeypatch):
    hub.publish(repo, "org/race")

    def meanwhile(*args) -> bool:
        other = [CommitOperationAdd("build/torch-cpu/other.py", b"")]
        hub.api.create_commit("org/race", other, commit_message="other", repo_type="kernel", revision="v1")
        return False

    monkeypatch.setattr(publish_tool, "_publish_card", meanwhile)
    repo.source("scale.py", "1.0", "2.0").commit().build()
    with pytest.raises(ToolError, match=r"refused \(412\): A commit has happened since"):
        publish(repo.root, repo_id="org/race", endpoint=hub.endpoint, token="hf_x")
    assert "build/torch-cpu/other.py" in hub.files("org/race", "v1")


def test_large_files_go_through_lfs(repo, tmp_path):
    with serve(tmp_path / "store", lfs_over=100) as endpoint:
        hub = Hub(endpoint, tmp_path / "home")
        hub.publish(repo, "org/large")
        entries = hub.api.list_repo_tree("org/large", "build/torch-cpu", repo_type="kernel", revision="v1")
        assert {entry.path.rpartition("/")[2] for entry in entries if entry.lfs} >= {"scale.py", "metadata.json"}
        assert hub.lock(project(tmp_path / "app", large=1)).returncode == 0
        assert hub.lock(tmp_path / "app", "--check").returncode == 0


# What publish refuses. NOBODY shows that it does so before it talks to a Hub.


def _dirty_tree(repo):
    repo.source("scale.py", "1.0", "2.0")


def _dirty_build(repo):
    _dirty_tree(repo)
    repo.build()
    repo.git("checkout", "-q", ".")


def _other_commit(repo):
    _dirty_tree(repo)
    repo.commit()


def _outside_git(repo):
    shutil.rmtree(repo.root / ".git")


def _not_built(repo):
    shutil.rmtree(repo.build_dir)


def _untracked_source(repo):
    (repo.package / "new.py").write_text("")


def _changed_file(repo):
    (repo.build_dir / "torch-xpu" / "scale.py").write_text("FACTOR = 3.0")


def _change_metadata(repo, variant, change):
    path = repo.build_dir / variant / "metadata.json"
    entries = json.loads(path.read_text())
    change(entries)
    path.write_text(json.dumps(entries))


def _missing_digest(repo):
    _change_metadata(repo, "torch-xpu", lambda entries: entries.pop("digest"))


def _mixed_versions(repo):
    _change_metadata(repo, "torch-xpu", lambda entries: entries.update(version=2))


def _no_provenance(repo):
    _change_metadata(repo, "torch-xpu", lambda entries: entries.pop("provenance"))


def _other_version(repo):
    repo.edit("build.toml", "version = 1", "version = 2").commit()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_dirty_tree, "has changes that are not committed"),
        (_untracked_source, "has changes that are not committed"),
        (_dirty_build, "torch-cpu was not built from a clean commit"),
        (_other_commit, "torch-cpu is of commit"),
        (_outside_git, "is not a git commit"),
        (_no_provenance, "torch-xpu was not built from a clean commit"),
        (_not_built, "holds no build"),
        (_changed_file, "torch-xpu is not what was built: .*scale.py"),
        (_missing_digest, "torch-xpu is not what was built: metadata.json has no digest"),
        (_mixed_versions, "versions 1, 2"),
        (_other_version, "the build is of version 1, build.toml says 2"),
    ],
)
def test_refused_before_any_request(repo, spoil, message):
    spoil(repo)
    with pytest.raises(ToolError, match=message):
        publish(repo.root, endpoint=NOBODY, token="hf_x")


def test_uncommitted_builds_go_to_a_loopback_hub_only(hub, repo):
    _dirty_tree(repo)
    repo.build()
    with pytest.raises(ToolError, match="hub.example does not"):
        publish(repo.root, endpoint="https://hub.example", token="hf_x", allow_dirty=True)
    assert "published" in hub.publish(repo, "org/rehearsal", "--allow-dirty")


@pytest.mark.parametrize(
    ("file", "old", "new", "lost"),
    [
        ("__init__.py", '["layers", "scale"]', '["layers"]', "scale"),
        ("__init__.py", '["layers", "scale"]', '["scale"]', "layers.Linear"),
        ("layers.py", "class Linear", "class Dense", "layers.Linear"),
    ],
)
def test_lost_public_names_need_a_new_version(hub, repo, file, old, new, lost):
    repo_id = f"org/lost-{lost.lower()}-from-{file.strip('_')}"
    hub.publish(repo, repo_id)
    before = hub.heads(repo_id)
    repo.source(file, old, new).commit().build()
    line = error_line(hub.run("-m", "tools.publish", str(repo.root), "--repo-id", repo_id))
    assert f"would lose {lost}; keep them, or bump version in build.toml" in line
    assert hub.heads(repo_id) == before
    hub.publish(repo.edit("build.toml", "version = 1", "version = 2").commit().build(), repo_id)
    assert hub.heads(repo_id)["v1"] == before["v1"]


@pytest.mark.parametrize("tool", ["publish", "lock"])
def test_unreachable_hub_is_one_line(hub, repo, tmp_path, tool):
    target = repo.root if tool == "publish" else project(tmp_path / "app", first=1)
    line = error_line(hub.run("-m", f"tools.{tool}", str(target), HF_ENDPOINT=NOBODY))
    assert f"cannot reach the Hub at {NOBODY}" in line


# Load


@pytest.fixture(scope="module")
def loads(hub, versions, tmp_path_factory) -> dict:
    """What several ways of loading answer, asked in one process: a result, or the error."""
    repo = KernelRepo(tmp_path_factory.mktemp("loads") / "kernel").build()
    hub.publish(repo, f"{TRUSTED}/kernel")
    hub.publish(repo.edit("build.toml", '"cpu", "cuda", "rocm", ', "").commit().build(), "org/xpu-only")
    return hub.python(f"""
import torch
from kernels import get_kernel, has_kernel

def attempt(function, *args, **kwargs):
    try:
        result = function(*args, **kwargs)
        return result if isinstance(result, bool) else float(result.scale(torch.ones(1)))
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

allow = {{"trust_remote_code": ["org/versions", "org/xpu-only"]}}
answer({{
    "untrusted": attempt(get_kernel, "org/versions", version=2),
    "allowed": attempt(get_kernel, "org/versions", version=2, **allow),
    "trusted": attempt(get_kernel, "{TRUSTED}/kernel", version=1),
    "no version": attempt(get_kernel, "org/versions", version=7, **allow),
    "no variant": attempt(get_kernel, "org/xpu-only", version=1, **allow),
    "has variant": attempt(has_kernel, "org/versions", version=1, **allow),
    "has no variant": attempt(has_kernel, "org/xpu-only", version=1, **allow),
}})
""")


def test_trust(loads):
    assert loads["untrusted"].startswith("ValueError: Kernel repository 'org/versions' is not from a trusted publisher")
    assert loads["allowed"] == 2.0
    assert loads["trusted"] == 1.0


def test_missing_version_says_which_there_are(loads):
    assert loads["no version"] == "ValueError: Version 7 not found, available versions: 1, 2"


def test_missing_variant_says_why_each_was_rejected(loads):
    assert loads["no variant"].startswith("FileNotFoundError: Cannot find a build variant for this system")
    assert "torch-xpu: backend (xpu) does not match system backend" in loads["no variant"]
    assert (loads["has variant"], loads["has no variant"]) == (True, False)


def test_versions_live_side_by_side_in_one_process(hub, versions):
    result = hub.python("""
import warnings
import torch
from kernels import get_kernel

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first, second = (get_kernel("org/versions", version=n, trust_remote_code=["org/versions"]) for n in (1, 2))
    results = [float(kernel.scale(torch.ones(1))) for kernel in (first, second, first)]
ops = torch._C._dispatch_get_all_op_names()
names = [name for kernel in (first, second) for name in ops if name.startswith(kernel.__name__)]
answer({"results": results, "names": names, "ids": [first.__name__, second.__name__],
        "warnings": [str(w.message) for w in caught if "regist" in str(w.message).lower()]})
""")
    assert result["results"] == [1.0, 2.0, 1.0]
    assert result["names"] == [f"{kernel}::scale" for kernel in result["ids"]] and len(set(result["ids"])) == 2
    assert result["warnings"] == []


def test_this_kernel_from_the_hub(hub, built):
    options = ["--build-dir", str(built / "build"), "--allow-dirty", "--repo-id", "org/real"]
    result = hub.run("-m", "tools.publish", str(ROOT), *options)
    assert result.returncode == 0, result.stderr
    difference, layers = hub.python("""
import torch
from kernels import get_kernel

dsv4 = get_kernel("org/real", version=1, trust_remote_code=["org/real"])
x = torch.linspace(-3, 3, 64, dtype=torch.float64).view(4, 16)
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
answer([float((dsv4.rms_norm(x) - expected).abs().max()), hasattr(dsv4.layers, "DeepseekV4RMSNorm")])
""")
    assert difference < 1e-12
    assert layers


# Pin


@pytest.fixture(scope="module")
def pinned(tmp_path_factory) -> tuple[Hub, Path, Path]:
    """A project with a kernels.lock, made while the Hub was up; now it is down. Also its store, to start it again."""
    folder = tmp_path_factory.mktemp("pinned")
    repo = KernelRepo(folder / "kernel").build()
    with serve(folder / "store") as endpoint:
        hub = Hub(endpoint, folder / "home")
        hub.publish(repo, "org/pinned")
        result = hub.lock(project(folder / "app", pinned=1))
        assert result.returncode == 0, result.stderr
        (locked,) = KernelLocks.from_json((folder / "app" / "kernels.lock").read_text()).values()
        assert locked.commit == hub.heads("org/pinned")["v1"]
        hub.publish(repo.source("scale.py", "1.0", "5.0").commit().build(), "org/pinned")  # v1 moves on
    return hub, folder / "app", folder / "store"


@pytest.fixture
def cache(pinned, tmp_path) -> Hub:
    """A copy of the pinned project's cache, to damage."""
    shutil.copytree(pinned[0].home, tmp_path / "home", symlinks=True)
    return Hub(NOBODY, tmp_path / "home")


def cached(hub: Hub, name: str) -> Path:
    (path,) = hub.home.glob(f"hub/kernels--org--pinned/snapshots/*/build/torch-cpu/{name}")
    return path


def test_offline_after_lock(pinned):
    hub, app, _ = pinned
    results = hub.python(
        f"""
import torch
from kernels import get_kernel, get_locked_kernel, load_kernel

lockfile = Path({str(app / "kernels.lock")!r})
kernels = [
    get_kernel("org/pinned", version=1, trust_remote_code=["org/pinned"]),
    get_locked_kernel("org/pinned", lockfile=lockfile, trust_remote_code=["org/pinned"]),
    load_kernel("org/pinned", lockfile=lockfile),
]
answer([float(kernel.scale(torch.ones(1))) for kernel in kernels])
""",
        HF_HUB_OFFLINE="1",
    )
    assert results == [1.0, 1.0, 1.0]


def test_check_holds_offline_and_without_a_hub(pinned):
    hub, app, _ = pinned
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOBODY}):
        result = hub.lock(app, "--check", **environment)
        assert result.returncode == 0, result.stderr
        assert "compared with the cache only" in result.stdout


def test_check_names_the_changed_file(pinned, cache):
    path = cached(cache, "scale.py")
    path.write_text(path.read_text().replace("1.0", "9.0"))
    result = cache.lock(pinned[1], "--check", HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    assert "org/pinned v1: build/torch-cpu: " in result.stderr and "scale.py" in result.stderr


def test_check_asks_the_hub_for_what_the_digest_does_not_cover(pinned, cache):
    path = cached(cache, "metadata.json")
    path.write_text(path.read_text().replace("Apache-2.0", "MIT"))
    assert cache.lock(pinned[1], "--check", HF_HUB_OFFLINE="1").returncode == 0
    with serve(pinned[2]) as endpoint:
        result = cache.lock(pinned[1], "--check", HF_ENDPOINT=endpoint)
    assert result.returncode == 1
    assert "build/torch-cpu/metadata.json differs from the Hub" in result.stderr


def test_check_notes_that_the_branch_has_moved_on(pinned):
    hub, app, store = pinned
    with serve(store) as endpoint:
        result = hub.lock(app, "--check", HF_ENDPOINT=endpoint)
    assert result.returncode == 0, result.stderr
    assert "note: org/pinned v1: the branch has moved on" in result.stdout


def test_fetch_caches_the_locked_commit_and_not_the_head(pinned, tmp_path):
    _, app, store = pinned
    with serve(store) as endpoint:
        hub = Hub(endpoint, tmp_path / "home")
        result = hub.lock(app, "--check")
        assert result.returncode == 1 and "not completely cached" in result.stderr
        assert hub.lock(app, "--fetch").returncode == 0
        assert hub.lock(app, "--check").returncode == 0
    assert "FACTOR = 1.0" in cached(hub, "scale.py").read_text()


def test_check_finds_what_is_not_locked(pinned, tmp_path):
    shutil.copy(pinned[1] / "kernels.lock", project(tmp_path / "app", pinned=2))
    result = pinned[0].lock(tmp_path / "app", "--check", HF_HUB_OFFLINE="1")
    assert "org/pinned v2 is in pyproject.toml but not locked" in result.stderr
    assert result.returncode == 1


def test_lock_of_two_kernels_is_the_same_every_time(hub, versions, tmp_path):
    hub.publish(KernelRepo(tmp_path / "kernel").build(), "org/another")
    texts = set()
    for order in ({"versions": 1, "another": 1}, {"another": 1, "versions": 1}):
        assert hub.lock(project(tmp_path / "app", **order)).returncode == 0
        texts.add((tmp_path / "app" / "kernels.lock").read_text())
    assert len(texts) == 1
    locks = KernelLocks.from_json(texts.pop())
    assert {d.repo_id: lock.commit for d, lock in locks.items()} == {
        name: hub.heads(name)["v1"] for name in ("org/versions", "org/another")
    }


def test_lock_errors(hub, versions, tmp_path):
    line = error_line(hub.lock(project(tmp_path, nothing=1)))
    assert line == f"error: the Hub at {hub.endpoint} has no kernel repository org/nothing"
    assert error_line(hub.lock(project(tmp_path, versions=3))) == "error: org/versions has no v3; versions: 1, 2"
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"org/versions" = ">=1"\n')
    assert "the version of org/versions must be a whole number" in error_line(hub.lock(tmp_path))
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"a/b/c" = 1\n')
    assert "a/b/c" in error_line(hub.lock(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert "has no [tool.kernels.dependencies]" in error_line(hub.lock(tmp_path))
    assert not (tmp_path / "kernels.lock").exists()
    assert "kernels.lock does not exist" in error_line(hub.lock(project(tmp_path, versions=1), "--check"))
