"""tools/download.py against a hub of this test: what arrives, what is resumed, what is refused."""

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from common.arguments import UserError
from common.models import fetch
from tools import download

SHA = "5" * 40
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
CUT_AT = 300_000
FILES = {
    "a/model": {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "README.md": b"#"},
    "a/old": {"config.json": b"{}", "pytorch_model.bin": WEIGHTS[:1000]},
    "a/gated": {},
}


class Hub(BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub calls for the repositories of FILES."""

    log: list[tuple[str, str, str | None]]
    num_cuts: int
    """Times that the connection breaks after CUT_AT bytes of the weights."""
    served: dict[str, bytes]
    """What is sent in the place of a file."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        Hub.log.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            self._describe(f"{owner}/{name}", rest)
        else:
            owner, name, _, _, *rest = path[1:].split("/")
            self._send_file(f"{owner}/{name}", "/".join(rest))

    def _describe(self, name: str, rest: list[str]) -> None:
        if name not in FILES:
            self._reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif name == "a/gated":
            self._reply(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif rest[:1] == ["tree"]:
            self._reply(200, [tree_entry(path, content) for path, content in FILES[name].items()])
        else:
            siblings = [{"rfilename": path} for path in FILES[name]]
            self._reply(200, {"id": name, "sha": SHA, "siblings": siblings, "private": False, "tags": []})

    def _reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
        ).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, name: str, path: str) -> None:
        content = FILES[name][path]
        body = Hub.served.get(path, content)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            stop = len(body)
            if path == "model.safetensors" and Hub.num_cuts:
                Hub.num_cuts -= 1
                stop = min(stop, CUT_AT)
            self.wfile.write(body[start:stop])
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def tree_entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
    if not path.endswith(".json"):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache's folder, with the hub in the place of the real one."""
    Hub.log, Hub.num_cuts, Hub.served = [], 0, {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    # Connections that the client has closed: its traceback would stand in the output that a test looks at.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield tmp_path / "hub"
    server.shutdown()
    server.server_close()


def snapshot(cache: Path, name: str) -> dict[str, bytes]:
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / SHA
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_arrives_and_is_read_offline(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download.main(["--model", "a/model", "--model", "a/old"]) == 0
    expected = {name: content for name, content in FILES["a/model"].items() if name != "README.md"}
    assert snapshot(hub, "a/model") == expected and snapshot(hub, "a/old") == FILES["a/old"]
    printed = capsys.readouterr().out
    assert "model a/model: 3 files, 0.00 GB; 0.00 GB to download, about 0 min at 100 MB/s" in printed
    assert printed.count("complete and verified") == 2 and "HF_HUB_OFFLINE=1 HF_HOME=" in printed
    num_requests = sum(command == "GET" and "/resolve/" in path for command, path, _ in Hub.log)
    assert download.main(["--model", "a/model"]) == 0  # nothing is sent again
    assert sum(command == "GET" and "/resolve/" in path for command, path, _ in Hub.log) == num_requests == 5
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for patterns in (["*.json"], ["*.json", "*.safetensors"], download.TOKENIZER_FILES):
        assert (fetch("a/model", "model", patterns) / "config.json").is_file()


def requests(ending: str) -> list[str | None]:
    """Ranges that were asked for of files with this ending."""
    return [asked for command, path, asked in Hub.log if command == "GET" and path.endswith(ending)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived is kept in whole chunks, of 10 MB otherwise; no pauses."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda _: None)


@pytest.mark.usefixtures("small_chunks")
def test_a_broken_connection_is_resumed(hub: Path) -> None:
    Hub.num_cuts = 1
    assert download.main(["--model", "a/model"]) == 0
    assert requests("model.safetensors") == [None, f"bytes={CUT_AT}-"]
    assert snapshot(hub, "a/model")["model.safetensors"] == WEIGHTS


@pytest.mark.usefixtures("small_chunks")
def test_a_download_that_failed_goes_on_with_what_is_not_whole(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Hub.num_cuts = 99
    assert download.main(["--model", "a/model"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: model a/model: ") and "Run the same command again" in error
    assert "model.safetensors" not in snapshot(hub, "a/model")
    Hub.num_cuts, Hub.log = 0, []
    assert download.main(["--model", "a/model"]) == 0
    assert len(requests("model.safetensors")) == 1 and requests("config.json") == []
    assert snapshot(hub, "a/model")["model.safetensors"] == WEIGHTS


def test_what_differs_from_the_hub_is_no_success(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Hub.served = {"model.safetensors": WEIGHTS[::-1]}
    assert download.main(["--model", "a/model"]) == 1
    assert "model.safetensors differ from the hub's size or checksum" in capsys.readouterr().err


def test_a_file_cut_short_in_the_cache_is_downloaded_again(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert download.main(["--model", "a/model"]) == 0
    [weights] = hub.rglob("model.safetensors")
    weights.resolve().write_bytes(WEIGHTS[:1000])
    assert download.main(["--model", "a/model"]) == 0
    assert "model.safetensors: damaged in the cache, downloaded again" in capsys.readouterr().out
    assert snapshot(hub, "a/model")["model.safetensors"] == WEIGHTS


def test_a_preset_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "download", lambda name, kind, patterns: asked.append((kind, name)))
    monkeypatch.setattr(download, "prepare_dataset", lambda name, config: asked.append(("prepared", name)))
    assert download.main(["--config", "chess_finetune_7b"]) == 0
    games = "laion/strategic_game_chess"
    assert asked == [("model", "codellama/CodeLlama-7b-hf"), ("dataset", games), ("prepared", games)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "a/none"], "model a/none: no public model of that name on the hub"),
        (["--model", "not a name"], "model not a name: no public model of that name"),
        (["--model", "a/gated"], "model a/gated is gated: accept its licence at https://huggingface.co/a/gated"),
        (["--config", "chess_finetune_demo"], "nothing to download: the preset names nothing on the hub"),
        (["--config", "none"], "--config none: no such preset; there are chess_finetune_100m"),
        ([], "nothing to download"),
    ],
)
def test_mistakes(hub: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert download.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_a_disk_that_is_too_small(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
    assert download.main(["--model", "a/model"]) == 2
    assert "0.00 GB free: set HF_HOME to a larger disk" in capsys.readouterr().err
    assert not any("/resolve/" in path for _, path, _ in Hub.log)


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert download.main(["--model", "a/model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: model a/model: {endpoint} cannot be reached") and error.count("\n") == 1
    assert "Run the same command again where there is a network" in error


def test_offline_is_said(hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download.main(["--model", "a/model"]) == 2 and "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    with pytest.raises(UserError, match=r'run `make download ARGS="--model a/model"`'):
        fetch("a/model", "model")
