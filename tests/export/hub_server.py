"""A stand-in for the Hugging Face Hub: the few endpoints that push and pull use, over repositories in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_writer"
READER = "hf_reader"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    """Those that were uploaded as large files."""
    commits: list[str] = field(default_factory=list)
    """Summaries."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files))).encode()).hexdigest()


class StandIn(ThreadingHTTPServer):
    """Serves until it is closed. One token may write, another only read; private repositories want one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self._read()
        for verb, pattern, handler in ROUTES:
            found = re.fullmatch(pattern, path)
            if verb in (method, "*") and found:
                handler(self, *found.groups())
                return
        self._answer(501, {"error": f"the stand-in does not know {method} {path}"})

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(
        self, status: int, value: Any = None, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _may_write(self) -> bool:
        if self._token == TOKEN:
            return True
        status = 403 if self._token == READER else 401
        self._answer(status, {"error": "not allowed"})
        return False

    def _repository(self, name: str) -> Repository | None:
        found = self.server.repositories.get(name)
        if found is None or (found.private and self._token not in (TOKEN, READER)):
            headers = {"X-Error-Code": "RepoNotFound"} if self._token else {}
            self._answer(404 if self._token else 401, {"error": "Repository not found"}, headers=headers)
            return None
        return found

    def create(self) -> None:
        if not self._may_write():
            return
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.server.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.server.address}/{name}"})
            return
        self.server.repositories[name] = Repository(bool(asked.get("private")) or asked.get("visibility") == "private")
        self._answer(200, {"url": f"{self.server.address}/{name}", "name": name, "id": name})

    def validate(self) -> None:
        import yaml

        content = json.loads(self.body)["content"]
        entries = yaml.safe_load(content.split("---")[1])
        errors = [] if isinstance(entries, dict) and entries["model-index"] else [{"message": "no metadata"}]
        self._answer(200 if not errors else 400, {"errors": errors, "warnings": []})

    def info(self, name: str, revision: str | None = None) -> None:
        if (found := self._repository(name)) is None:
            return
        if revision not in (None, "main", found.sha):
            self._answer(404, {"error": "Invalid rev id"}, headers={"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": path} for path in found.files]
        self._answer(200, {"id": name, "sha": found.sha, "private": found.private, "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        if (found := self._repository(name)) is None:
            return
        entries = []
        for path, data in found.files.items():
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": oid}
            if path in found.lfs:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        self._answer(200, entries)

    def preupload(self, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._repository(name)) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".mp4", ".gz", ".png")) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._answer(200, {"files": files, "commitOid": found.sha})

    def batch(self, name: str) -> None:
        if not self._may_write():
            return
        asked = json.loads(self.body)
        assert "basic" in asked["transfers"]
        objects = []
        for each in asked["objects"]:
            entry: dict[str, Any] = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.objects:
                entry["actions"] = {
                    "upload": {"href": f"{self.server.address}/storage/{each['oid']}"},
                    "verify": {"href": f"{self.server.address}/verify/{each['oid']}"},
                }
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.objects[oid] = self.body
        self._answer(200, {})

    def verify(self, oid: str) -> None:
        self._answer(200 if oid in self.server.objects else 404, {})

    def commit(self, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._repository(name)) is None:
            return
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                found.commits.append(value["summary"])
            elif entry["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                found.files[value["path"]] = self.server.objects[value["oid"]]
                found.lfs.add(value["path"])
            else:
                assert entry["key"] == "deletedFile"
                del found.files[value["path"]]
        url = f"{self.server.address}/{name}/commit/{found.sha}"
        self._answer(200, {"success": True, "commitOid": found.sha, "commitUrl": url})

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (found := self._repository(name)) is None:
            return
        if path not in found.files:
            self._answer(404, {"error": "Entry not found"}, headers={"X-Error-Code": "EntryNotFound"})
            return
        data = found.files[path]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"X-Repo-Commit": found.sha, "ETag": etag, "Accept-Ranges": "bytes"}
        if path in found.lfs:
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
        self._answer(200, data=data, headers=headers)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", rf"/api/models/{NAME}", _Handler.info),
    ("GET", rf"/api/models/{NAME}/revision/(.+)", _Handler.info),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)", _Handler.tree),
    ("POST", rf"/api/models/{NAME}/preupload/([^/]+)", _Handler.preupload),
    ("POST", rf"/api/models/{NAME}/commit/([^/]+)", _Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/storage/(\w+)", _Handler.store),
    ("POST", r"/verify/(\w+)", _Handler.verify),
    ("*", rf"/{NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
