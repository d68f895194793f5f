"""A hub on loopback that the real huggingface_hub client talks to, with faults to switch on and a log of requests.

It keeps everything in memory and listens on a free port of 127.0.0.1. `hub_routes` answers, `hub_commits` stores.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import socket
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hub_routes
from hub_commits import Commit, HubError, HubStore, Repo, User
from hub_messages import Request, Response, as_json

MAX_BODY = 1 << 30  # bytes of one request
CLOSED_PROXY = "http://127.0.0.1:1"  # nothing listens there: what isn't loopback fails at once
_PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass
class Call:
    """One request as the server saw it: `file` is the path in the repository, `sent` the bytes of the answer's body."""

    method: str
    path: str
    file: str | None = None
    status: int = 0
    user: str | None = None
    range: str | None = None
    sent: int = 0


@dataclass
class Fault:
    """A fault waiting for its requests. `left` counts down to 0 as they come."""

    name: str
    path: str
    left: int
    options: dict[str, Any] = field(default_factory=dict)

    def fits(self, method: str, path: str) -> bool:
        methods, pattern = FAULTS[self.name]
        wanted = self.options.get("method")
        right_method = method == wanted if wanted else method in methods
        names = {self.path, f"*/{self.path}"} if self.path != "*" else {pattern}
        return self.left > 0 and right_method and any(fnmatch.fnmatch(path, name) for name in names)


# The methods that a fault applies to and, where the test names no path, the paths.
_ANY = ("GET", "HEAD", "POST", "PUT", "DELETE")
FAULTS = {
    "cut_download": (("GET",), "*/resolve/*"),  # after=bytes, then the connection ends
    "flip_download": (("GET",), "*/resolve/*"),  # offset=position of the changed byte in this answer
    "truncate_download": (("GET",), "*/resolve/*"),  # size=bytes sent, without a Content-Length
    "commit_error": (("POST",), "*/commit/*"),  # status=500, before anything is written
    "lost_commit_answer": (("POST",), "*/commit/*"),  # the commit is made, but the client never hears of it
    "cut_upload": (("PUT",), "/lfs/*"),  # after=bytes read, then the connection ends
    "unauthorized": (_ANY, "*"),  # 401 whatever the token
    "status": (_ANY, "*"),  # status=, code="" (X-Error-Code)
}


class HubServer:
    """The local hub. Use it as a context manager, or call `close`.

    Attributes: `url`; `log`, the calls in order; `errors`, tracebacks of the server itself (empty unless it is broken);
    `page_size` of lists; `store`. `home` is the folder that `env` gives to a subprocess as HF_HOME.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = HubStore()
        self.log: list[Call] = []
        self.errors: list[str] = []
        self.page_size = 1000
        self.token: str | None = None
        self._faults: list[Fault] = []
        self._listener = _Listener(self)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: later connections are refused. Closes what is open and waits for its threads."""
        if self._thread.is_alive():
            self._listener.stop()
            self._thread.join(5)

    def add_user(self, name: str, *, orgs: tuple[str, ...] = (), role: str = "write") -> str:
        """A new account. Returns its token."""
        token = f"hf_{name}{'0' * 34}"[:37]
        self.store.users[token] = User(name, orgs, role)
        return token

    def create(self, repo_id: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repo:
        """A model repository made by the server itself, with its files in one commit. Names are not checked."""
        repo = self.store.create(repo_id, private=private)
        if files:
            repo.write(dict(files))
        return repo

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.store.repos[repo_type, repo_id]

    def head(self, repo_id: str) -> Commit:
        return self.repo(repo_id).head

    def fault(self, name: str, *, path: str = "*", times: int = 1, **options: Any) -> Fault:
        """Spoil the next `times` requests that fit. `path` is a glob for the whole path or its end.

        Names: see `FAULTS`. Options: `after`, `offset`, `size` in bytes; `status`, `code`; `method` instead of any.
        """
        if name not in FAULTS:
            raise KeyError(f"no fault {name!r}; there are {sorted(FAULTS)}")
        fault = Fault(name, path, times, options)
        self._faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        self._faults.clear()

    def calls(self, method: str = "*", path: str = "*") -> list[Call]:
        """The calls of a method to paths that fit the glob, in order."""
        found = [call for call in self.log if fnmatch.fnmatch(call.method, method)]
        return [call for call in found if fnmatch.fnmatch(call.path, path)]

    def downloaded(self) -> list[str]:
        """The paths of the files whose content was fetched, in order and without their repository."""
        return [call.file for call in self.log if call.method == "GET" and call.file is not None]

    def env(self, *, token: str | bool | None = True, **more: str) -> dict[str, str]:
        """The environment of a subprocess that uses this hub: `os.environ` with the hub's variables.

        `token` is True for the token of the fixture's user, None for none. `more` are further variables.
        """
        dropped = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", *_PROXY_NAMES, *(name.lower() for name in _PROXY_NAMES))
        env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return {**env, **self.variables(self.token if token is True else token or None), **more}

    def variables(self, token: str | None) -> dict[str, str]:
        """The variables that point a client at this hub and at nothing else."""
        folders = {"HF_HOME": ".", "HF_HUB_CACHE": "hub", "HF_XET_CACHE": "xet", "HF_ASSETS_CACHE": "assets"}
        return {
            "HF_ENDPOINT": self.url,
            **{name: str(self.home / folder) for name, folder in folders.items()},
            **({"HF_TOKEN": token} if token else {}),
            **dict.fromkeys(_PROXY_NAMES, CLOSED_PROXY),
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The first fault that fits a request, counted down."""
        with self.store.lock:
            fault = next((fault for fault in self._faults if fault.fits(method, path)), None)
            if fault is not None:
                fault.left -= 1
            return fault


class _Listener(ThreadingHTTPServer):
    """Threads and sockets that can be ended from outside, so that nothing outlives a test."""

    daemon_threads = True

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.open: dict[threading.Thread, socket.socket] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self._work, args=(request, client_address), daemon=True)
        self.open[thread] = request
        thread.start()

    def _work(self, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            self.open.pop(threading.current_thread(), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.hub.errors.append(traceback.format_exc())

    def stop(self) -> None:
        self.shutdown()
        for thread, request in list(self.open.items()):
            end(request)
            thread.join(5)
        self.server_close()


def end(connection: socket.socket) -> None:
    """End a connection in both directions; the other side sees it at once."""
    with contextlib.suppress(OSError):  # the other side may be faster
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        try:
            self._exchange(self.server.hub)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 (names of http.server)

    def _exchange(self, hub: HubServer) -> None:
        request = Request(self.command, self.path, self.headers, b"")
        user = hub.store.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        name = user.name if user else None
        call = Call(self.command, request.path, request.file, user=name, range=self.headers.get("Range"))
        hub.log.append(call)
        fault = hub.take_fault(self.command, request.path)
        if fault is not None and fault.name == "cut_upload":
            self.rfile.read(fault.options.get("after", 0))
            self._hang_up()
            return
        request = Request(self.command, self.path, self.headers, self._body())
        response = self._answer(hub, request, fault)
        call.status, call.sent = response.status, 0 if self.command == "HEAD" else len(response.body)
        if fault is not None and fault.name == "lost_commit_answer":
            self._hang_up()
            return
        self._send(response, fault if response.is_file else None)

    def _answer(self, hub: HubServer, request: Request, fault: Fault | None) -> Response:
        try:
            if fault is not None and fault.name == "unauthorized":
                raise HubError(401, "", "Invalid credentials in Authorization header")
            if fault is not None and fault.name in {"commit_error", "status"}:
                status = fault.options.get("status", 500)
                raise HubError(status, fault.options.get("code", ""), "A fault that the test asked for")
            return hub_routes.answer(hub.store, hub.url, hub.page_size, request)
        except HubError as error:
            headers = {**error.headers, "X-Error-Message": error.message.encode("ascii", "replace").decode()}
            if error.code:
                headers["X-Error-Code"] = error.code
            return as_json(error.body, error.status, headers)
        except Exception:
            hub.errors.append(f"{request.method} {request.target}\n{traceback.format_exc()}")
            return as_json({"error": "the local hub is broken"}, 500)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        size = int(self.headers.get("Content-Length", 0))
        if size > MAX_BODY:
            raise ConnectionError(f"a body of {size} bytes")
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionError("the client left in the middle of its request")
        return body

    def _send(self, response: Response, fault: Fault | None) -> None:
        kind = fault.name if fault is not None else ""
        body = response.body
        if kind == "flip_download":
            body = bytearray(body)
            body[fault.options.get("offset", 0)] ^= 0xFF
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if kind == "truncate_download":
            body = body[: fault.options["size"]]
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: fault.options["after"]] if kind == "cut_download" else body)
        if kind == "cut_download":
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        end(self.connection)
