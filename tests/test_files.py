"""What is on disk before a name is given, and what a name stands for when a write breaks off."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.files import locked, publish, user_path, write_text
from common.launch import write_config


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flushes and renames in their order, by paths relative to tmp_path."""
    recorded: list[str] = []
    flush, rename, replace = os.fsync, Path.rename, Path.replace

    def relative(path: Path | str) -> str:
        return str(Path(path).relative_to(tmp_path))

    def recorded_flush(descriptor: int) -> None:
        recorded.append(relative(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        recorded.append(f"{relative(path)} -> {relative(target)}")
        return rename(path, target)

    def recorded_replace(path: Path, target: Path) -> Path:
        recorded.append(f"{relative(path)} -> {relative(target)}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded_flush)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    return recorded


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path: Path, events: list[str]) -> None:
    for path in ("model/old", "model.tmp/weights", "model.tmp/inner/config"):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(path)
    publish(tmp_path / "model.tmp", tmp_path / "model")
    files = {"model.tmp", "model.tmp/weights", "model.tmp/inner", "model.tmp/inner/config"}
    assert set(events[:4]) == files
    assert events[4:] == ["model -> model.old.tmp", "model.tmp -> model", "."]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == sorted(
        name.replace("model.tmp", "model") for name in files
    )


def test_a_file_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    write_text(path, "old\n")
    assert events == ["config.yaml.tmp", "config.yaml.tmp -> config.yaml", "."]

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    args: Any = SimpleNamespace(output_dir=tmp_path, to_dict=lambda: {"seed": 1})
    for write in (lambda: write_text(path, "new\n"), lambda: write_config(args)):
        with pytest.raises(OSError, match="No space left"):
            write()
        assert path.read_text() == "old\n"
        assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"], "no room is taken by half a file"


def test_the_home_folder_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/run") == Path("/home/me/run") and user_path("a/~") == Path("a/~")


def test_a_locked_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with locked(tmp_path / "folder"):
            order.append("second")
            assert list((tmp_path / "folder").iterdir()) == []

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "folder"):
            (tmp_path / "folder" / "file").touch()
            waiting = pool.submit(second)
            time.sleep(0.3)
            order.append("first")
            shutil.rmtree(tmp_path / "folder")
        waiting.result(timeout=30)
    assert order == ["first", "second"]
