"""A hub on this machine, as the library reads it, and a cache that has its models."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """A hub with models by name, each a folder; requests: those for files of models."""

    def __init__(self, models):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.models, self.requests = models, list[str]()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self):
        self._answer(has_body=False)

    def do_GET(self):
        self._answer(has_body=True)

    def log_message(self, *_):
        pass

    def _answer(self, *, has_body):
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        if not is_api and path.startswith("own/"):
            self.server.requests.append(f"{self.command} {self.path}")
        owner, model, *rest = path.removeprefix("api/models/").split("/")
        folder = self.server.models.get(f"{owner}/{model}")
        headers, data, status = {"X-Repo-Commit": COMMIT}, b"", 200
        file = folder / "/".join(rest[2:]) if folder is not None and rest[:1] == ["resolve"] else None
        if folder is None:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif is_api:
            data = json.dumps(_listing(f"{owner}/{model}", folder, rest)).encode()
            headers["Content-Type"] = "application/json"
        elif file is None or not file.is_file():
            status, headers = 404, {"X-Error-Code": "EntryNotFound"}
        else:
            data = file.read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(data)


def _listing(name, folder, rest):
    """A model's files, as the endpoints of the tree and of the model tell them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    if rest[:1] == ["tree"]:
        pairs = zip(names, files, strict=True)
        return [{"type": "file", "path": name, "oid": "0" * 40, "size": file.stat().st_size} for name, file in pairs]
    return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names], "private": False}


@contextmanager
def serving(models):
    with Hub(models) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def snapshot(cache, name):
    """A folder for the files of a model in a cache."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    found = model / "snapshots" / COMMIT
    found.mkdir(parents=True)
    return found


def cached(folder, cache, name="own/tiny"):
    """A cache that has the model of a folder."""
    shutil.copytree(folder, snapshot(cache, name), dirs_exist_ok=True)
    return cache


def nanovllm(*arguments, cache, endpoint):
    """The command with this hub and this cache, run to its end."""
    own = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "nanovllm.cli", *arguments], env=os.environ | own, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def generate_once(model, cache, endpoint, *flags):
    """The command that fetches a model of a hub into a cache and generates one token, run to its end."""
    line = f"generate one --raw --max-tokens 1 --enforce-eager --max-model-len 64 --model {model}"
    return nanovllm(*line.split(), *flags, cache=cache, endpoint=endpoint)
