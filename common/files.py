"""Files and folders that are whole under their own names, whenever the program or the machine stops."""

import codecs
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def user_path(text: str) -> Path:
    """Path of a command's argument; a shell leaves the ~ of --output=~/run as it is."""
    return Path(text).expanduser()


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bad_utf8_line(path: Path | str) -> int:
    """Number of the line with the first byte that is not UTF-8; of the last line where a character is cut off."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with open(path, "rb") as parts:
        try:
            while part := parts.read(2**20):
                decoder.decode(part)
                line += part.count(b"\n")
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
    return line


def write_text(path: Path, text: str) -> None:
    """Write a file at once: under its name is the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder where it is missing, and have other processes wait that ask for it meanwhile."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                is_this = os.path.samestat(os.fstat(descriptor), folder.stat())
            except FileNotFoundError:  # removed while this process waited
                is_this = False
            if is_this:
                yield
                return
        finally:
            os.close(descriptor)


def publish(temporary: Path, folder: Path) -> None:
    """Give a folder that is written its name, once it is on disk; one of that name before is removed afterwards."""
    for parent, _, names in os.walk(temporary):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
    old = folder.with_name(folder.name + ".old.tmp")  # never half removed under its own name
    if is_replaced := folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a run that was killed here
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    if is_replaced:
        shutil.rmtree(old, ignore_errors=True)
