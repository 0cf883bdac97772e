"""A Hugging Face Hub on this machine that takes uploads of the real client, or refuses them."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_thisIsTheSecretTokenOfTheTests0123456789"
KINDS = {"models": "model", "datasets": "dataset"}


class LocalServer:
    """Serves requests of this machine until the block ends; its handlers know it as ``server.owner``."""

    def __init__(self, handler):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class LocalHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the headers to be acknowledged

    def respond(self, status, data, headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Not among the tests' output."""


class Hub(LocalServer):
    """Serves until the block ends.

    Attributes:
        private: whether a repository is private, by its kind and name.
        files: what its commits have put there, by path.
        commits: of all repositories.
        refuse: status with which a step is answered: "create", "preupload", "batch", "put" or "commit".
    """

    def __init__(self):
        self.private: dict[tuple[str, str], bool] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits = 0
        self.refuse: dict[str, int] = {}
        self.large: dict[str, bytes] = {}
        super().__init__(Handler)

    def make(self, repository, kind="model", private=False):
        self.private[kind, repository] = private
        self.files[kind, repository] = {}

    def address(self, kind, name):
        return f"{self.url}/{'' if kind == 'model' else 'datasets/'}{name}"

    def create(self, body):
        kind, name = body.get("type", "model"), f"{body['organization']}/{body['name']}"
        url = self.address(kind, name)
        if (kind, name) in self.files:
            return 409, {"error": "You already created this repo", "url": url}
        self.make(name, kind, body.get("private") or body.get("visibility") == "private")
        return 200, {"url": url}

    def commit(self, repository, lines):
        new = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                new[value["path"]] = self.large[value["oid"]]
            else:
                assert line["key"] == "header" and value["summary"], line
        self.files[repository] |= new
        self.commits += 1
        url = f"{self.address(*repository)}/commit/1"
        return 200, {"commitUrl": url, "commitOid": "1" * 40, "pullRequestUrl": None}


class Handler(LocalHandler):
    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(self.body())

    def do_PUT(self):
        self.answer(self.body())

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def answer(self, body):
        status, found = self.route(self.server.owner, self.path.partition("?")[0], body)
        headers = {}
        if status >= 400 and status != 409:  # a careless server repeats what it was sent
            headers["X-Error-Message"] = f"refused {self.headers.get('Authorization')}"
            found = {"error": headers["X-Error-Message"]}
        self.respond(status, json.dumps(found).encode(), headers | {"Content-Type": "application/json"})

    def route(self, hub, path, body):
        if found := re.fullmatch(r"/put/(\w+)", path):  # as S3, which is given no token
            assert hashlib.sha256(body).hexdigest() == found[1]
            hub.large[found[1]] = body
            return hub.refuse.get("put", 200), {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {}
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return (hub.refuse["create"], {}) if "create" in hub.refuse else hub.create(json.loads(body))
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            repository = "dataset" if found[1] else "model", found[2]
            step = "batch"
        else:
            found = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(preupload|commit)/main)?", path)
            repository, step = (KINDS[found[1]], found[2]), found[3]
        if step in hub.refuse or repository not in hub.files:
            return hub.refuse.get(step, 404), {}
        if step is None:
            return 200, {"id": repository[1], "private": hub.private[repository]}
        if step == "commit":
            return hub.commit(repository, map(json.loads, body.splitlines()))
        if step == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".gz")) else "regular" for name in names}
            return 200, {
                "files": [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()]
            }
        objects = json.loads(body)["objects"]
        actions = [{"upload": {"href": f"{hub.url}/put/{one['oid']}"}} for one in objects]
        objects = [one | {"actions": action} for one, action in zip(objects, actions, strict=True)]
        return 200, {"transfer": "basic", "objects": objects}
