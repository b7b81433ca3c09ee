"""A Hub on this machine, for tests and rehearsals: what `kernels` and `huggingface_hub` use of the HTTP interface.

It listens on 127.0.0.1 only, takes any token, and keeps repositories in a folder: create, branch, upload (inline or
LFS), list, download. Clients find it through HF_ENDPOINT, which they read when they are imported:

    HF_ENDPOINT=http://127.0.0.1:8000 HF_TOKEN=hf_x HF_HUB_DISABLE_XET=1 python -m tools.publish

The folder holds <type>s/<owner>/<name>/refs/<branch> (a commit), .../commits/<commit>.json (path -> file) and
objects/<oid>. Object ids are git's, as clients compare them with local files. Commits are linear; there are no tags,
pull requests, permissions or file locks.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

NEVER_LFS = 1 << 62


class HubError(Exception):
    """An error answer. huggingface_hub picks its exception by `code`, the X-Error-Code header."""

    def __init__(self, status: int, message: str, code: str | None = None, **body):
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **body}


class Repository:
    """One repository in a folder: branches, commits and the tree (path -> file entry) of each commit."""

    def __init__(self, folder: Path, objects: Path):
        self.folder, self.objects = folder, objects

    def exists(self) -> bool:
        return (self.folder / "refs").is_dir()

    def create(self) -> None:
        for name in ("refs", "commits"):
            (self.folder / name).mkdir(parents=True)
        self.commit("main", {}, "initial commit", parent=None)

    def branches(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted((self.folder / "refs").iterdir())}

    def create_branch(self, name: str, start: str) -> None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise HubError(400, f"Invalid branch name: {name}")
        if name in self.branches():
            raise HubError(409, f"Reference already exists: {name}")
        (self.folder / "refs" / name).write_text(self.resolve(start))

    def resolve(self, revision: str) -> str:
        """The commit that a branch name, a full ref or a commit id stands for."""
        revision = revision.removeprefix("refs/heads/")
        if commit := self.branches().get(revision):
            return commit
        if re.fullmatch("[0-9a-f]{40}", revision) and (self.folder / "commits" / f"{revision}.json").is_file():
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, revision: str) -> dict[str, dict]:
        return json.loads((self.folder / "commits" / f"{self.resolve(revision)}.json").read_text())["tree"]

    def commit(self, branch: str, tree: dict[str, dict], message: str, parent: str | None) -> str:
        text = json.dumps({"parent": parent, "message": message, "tree": tree}, sort_keys=True)
        commit = hashlib.sha1(f"{self.folder}\n{text}".encode()).hexdigest()
        (self.folder / "commits" / f"{commit}.json").write_text(text)
        (self.folder / "refs" / branch).write_text(commit)
        return commit

    def add_file(self, content: bytes) -> dict:
        oid = _git_blob_id(content)
        (self.objects / oid).write_bytes(content)
        return {"oid": oid, "size": len(content)}

    def add_lfs_file(self, sha256: str) -> dict:
        """The entry of an object that was uploaded by its sha256: in git, a pointer file stands for it."""
        if not (self.objects / sha256).is_file():
            raise HubError(400, f"LFS object {sha256} was not uploaded")
        size = (self.objects / sha256).stat().st_size
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        lfs = {"oid": sha256, "size": size, "pointerSize": len(pointer)}
        return {"oid": _git_blob_id(pointer), "size": size, "lfs": lfs}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path, port: int, trusted: Iterable[str], lfs_over: int):
        super().__init__(("127.0.0.1", port), Handler)
        self.root, self.trusted, self.lfs_over = Path(root), frozenset(trusted), lfs_over
        self.objects = self.root / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()  # one request at a time: the store is plain files

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repository(self, kind: str, name: str, must_exist: bool = True) -> Repository:
        repository = Repository(self.root / kind / name, self.objects)
        if must_exist and not repository.exists():
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository


class Handler(BaseHTTPRequestHandler):
    """Finds the route of a request and sends what it returns; see ROUTES below."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; do not wait between them
    server: Server

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for route_method, pattern, answer in ROUTES:
                if route_method == method and (match := re.fullmatch(pattern, url.path)):
                    with self.server.lock:
                        result = answer(self, **{key: unquote(value or "") for key, value in match.groupdict().items()})
                    break
            else:
                raise HubError(404, f"no route for {self.command} {url.path}")
            if not isinstance(result, tuple):
                result = json.dumps(result).encode(), {"Content-Type": "application/json"}
            self.send(200, *result)
        except HubError as error:
            headers = {"Content-Type": "application/json", "X-Error-Message": str(error)}
            headers |= {"X-Error-Code": error.code} if error.code else {}
            self.send(error.status, json.dumps(error.body).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def log_message(self, *args) -> None:
        """Stay silent; tests read the output of this process."""


ROUTES: list[tuple[str, str, Callable]] = []
NAME = r"(?P<name>\w[\w.-]*/\w[\w.-]*)"
REPO = rf"(?P<kind>kernels|models|datasets)/{NAME}"


def route(method: str, pattern: str) -> Callable[[Callable], Callable]:
    """Register a function as the answer to requests; the pattern's groups are its arguments.

    It returns a JSON value, or (bytes, headers). GET answers HEAD as well.
    """
    return lambda function: ROUTES.append((method, pattern, function)) or function


@route("POST", "/api/repos/create")
def create_repo(request: Handler):
    wanted = request.json()
    kind, name = wanted.get("type", "model") + "s", f"{wanted.get('organization') or 'user'}/{wanted['name']}"
    described = {"url": f"{request.server.endpoint}/{kind}/{name}", "name": name, "id": name}
    repository = request.server.repository(kind, name, must_exist=False)
    if repository.exists():
        raise HubError(409, "You already created this repo", **described)  # exist_ok reads `url` from the error
    repository.create()
    return described


@route("GET", "/api/organizations/(?P<owner>[^/]+)/overview")
def organization(request: Handler, owner: str):
    return {"name": owner, "fullname": owner, "trustedKernelPublisher": owner in request.server.trusted}


@route("GET", "/api/whoami-v2")
def whoami(request: Handler):
    return {"type": "user", "name": "user", "orgs": []}


@route("POST", "/api/validate-yaml")
def validate_card(request: Handler):
    return {"errors": [], "warnings": []}


@route("GET", f"/api/{REPO}(?:/revision/(?P<revision>[^/]+))?")
def repo_info(request: Handler, kind: str, name: str, revision: str):
    repository = request.server.repository(kind, name)
    commit = repository.resolve(revision or "main")
    return {
        "id": name,
        "author": name.partition("/")[0],
        "sha": commit,
        "private": False,
        "gated": False,
        "downloads": 0,
        "likes": 0,
        "siblings": [{"rfilename": path} for path in repository.tree(commit)],
    }


@route("GET", f"/api/{REPO}/refs")
def list_refs(request: Handler, kind: str, name: str):
    heads = request.server.repository(kind, name).branches().items()
    branches = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit} for branch, commit in heads]
    return {"branches": branches, "converts": [], "tags": [], "pullRequests": []}


@route("POST", f"/api/{REPO}/branch/(?P<branch>[^/]+)")
def create_branch(request: Handler, kind: str, name: str, branch: str):
    request.server.repository(kind, name).create_branch(branch, request.json().get("startingPoint", "main"))
    return {}


@route("GET", f"/api/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?")
def list_tree(request: Handler, kind: str, name: str, revision: str, folder: str):
    recursive = request.query.get("recursive", "false").lower() in ("true", "1")
    prefix = f"{folder}/" if folder else ""
    files, folders = [], set()
    for path, entry in request.server.repository(kind, name).tree(revision).items():
        if not path.startswith(prefix):
            continue
        parents = path.removeprefix(prefix).split("/")[:-1]
        shown = parents if recursive else parents[:1]
        folders |= {prefix + "/".join(shown[: depth + 1]) for depth in range(len(shown))}
        if recursive or not parents:
            files.append({"type": "file", "path": path, **entry})
    if folder and not files and not folders:
        raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    described = [{"type": "directory", "path": path, "oid": _git_blob_id(path.encode()), "size": 0} for path in folders]
    return sorted(described + files, key=lambda entry: entry["path"])


@route("POST", f"/api/{REPO}/preupload/(?P<revision>[^/]+)")
def preupload(request: Handler, kind: str, name: str, revision: str):
    """How each file is to be sent, and the id of what is there now: the client leaves out what has not changed."""
    tree = request.server.repository(kind, name).tree(revision)
    files = []
    for file in request.json()["files"]:
        current = tree.get(file["path"], {})
        mode = "lfs" if file["size"] > request.server.lfs_over else "regular"
        oid = current.get("lfs", current).get("oid")
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": files}


@route("POST", f"/api/{REPO}/commit/(?P<branch>[^/]+)")
def commit(request: Handler, kind: str, name: str, branch: str):
    repository = request.server.repository(kind, name)
    if branch not in repository.branches():
        raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
    parent = repository.resolve(branch)
    tree, message = repository.tree(parent), ""
    for line in request.body.splitlines():
        operation = json.loads(line)
        key, value = operation["key"], operation["value"]
        if key == "header":
            message = value["summary"]
            if value.get("parentCommit", parent) != parent:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
        elif key == "file":
            tree[value["path"]] = repository.add_file(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            tree[value["path"]] = repository.add_lfs_file(value["oid"])
        elif key == "deletedFile":
            if tree.pop(value["path"], None) is None:
                raise HubError(404, f"{value['path']} does not exist on {branch}", "EntryNotFound")
        elif key == "deletedFolder":
            tree = {path: entry for path, entry in tree.items() if not path.startswith(value["path"].rstrip("/") + "/")}
    oid = repository.commit(branch, tree, message, parent)
    return {"success": True, "commitOid": oid, "commitUrl": f"{request.server.endpoint}/{kind}/{name}/commit/{oid}"}


@route("POST", rf"/(?P<kind>kernels|models|datasets)/{NAME}\.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, kind: str, name: str):
    objects = []
    for wanted in request.json()["objects"]:
        upload = {"actions": {"upload": {"href": f"{request.server.endpoint}/lfs/{wanted['oid']}", "header": {}}}}
        known = (request.server.objects / wanted["oid"]).is_file()
        objects.append({"oid": wanted["oid"], "size": wanted["size"], **({} if known else upload)})
    return {"transfer": "basic", "objects": objects}


@route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})")
def lfs_upload(request: Handler, oid: str):
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise HubError(400, "the content does not have this sha256")
    (request.server.objects / oid).write_bytes(request.body)
    return {}


@route("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def download(request: Handler, kind: str, name: str, revision: str, path: str):
    repository = request.server.repository(kind, name)
    commit = repository.resolve(revision)
    entry = repository.tree(commit).get(path)
    if entry is None:
        raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
    oid = entry.get("lfs", entry)["oid"]
    headers = {"Content-Type": "application/octet-stream", "X-Repo-Commit": commit, "ETag": f'"{oid}"'}
    if "lfs" in entry:
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(entry["size"])}
    return (request.server.objects / oid).read_bytes(), headers


def _git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(root: Path, port: int = 0, trusted: Iterable[str] = (), lfs_over: int = NEVER_LFS) -> Iterator[str]:
    """Serve the repositories under `root` while the block runs, and yield the endpoint's URL.

    Args:
        port: 0 takes a free one.
        trusted: owners that are trusted kernel publishers.
        lfs_over: files of more bytes than this are uploaded through LFS.

    Raises OSError if the port is taken.
    """
    server = Server(root, port, trusted, lfs_over)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.loopback_hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="folder for the repositories; made if it is missing")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--trusted", default="", metavar="ORG,...", help="owners that are trusted publishers")
    parser.add_argument("--lfs-over", type=int, default=NEVER_LFS, metavar="BYTES", help="larger files go through LFS")
    args = parser.parse_args(argv)
    try:
        with serve(args.root, args.port, filter(None, args.trusted.split(",")), args.lfs_over) as endpoint:
            print(f"HF_ENDPOINT={endpoint}", flush=True)
            threading.Event().wait()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
