"""Folders that nobody else can write into: checking, making and opening them. POSIX calls only, no torch.

A folder is private when every ancestor belongs to us or root and nobody else may write there (a sticky folder such as
/tmp may be writable, for then others cannot rename what is ours), and the folder itself is ours alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Unsafe(Exception):
    """Why a folder or file is not used; never leaves the cache."""


def why_not_private(path: str) -> str | None:
    """The reason why `path` (absolute) may not be trusted, or None. Every component is looked at without following links."""
    parts = path.strip("/").split("/")
    for k in range(len(parts) + 1):
        here = "/" + "/".join(parts[:k])
        try:
            found = os.lstat(here)
        except OSError as error:
            return f"{here}: {error.strerror}"
        last = k == len(parts)
        if stat.S_ISLNK(found.st_mode):
            return f"{here} is a symbolic link"
        if not stat.S_ISDIR(found.st_mode):
            return f"{here} is not a folder"
        if found.st_uid != os.getuid() and (last or found.st_uid != 0):
            return f"{here} belongs to user {found.st_uid}"
        if found.st_mode & _OTHERS_WRITE and (last or not found.st_mode & stat.S_ISVTX):
            return f"{here} can be written by others"
    return None


def open_private(path: str) -> int:
    """A descriptor of the private folder `path`, made (0700) if it is not there. Raises Unsafe or OSError."""
    path = os.path.abspath(path)
    # links above the folder are resolved once (/home may be one); the result is then checked without following any
    parent = os.path.realpath(os.path.dirname(path))
    path = os.path.join(parent, os.path.basename(path))
    os.makedirs(path, mode=0o700, exist_ok=True)
    reason = why_not_private(path)
    if reason:
        raise Unsafe(reason)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        os.close(fd)
        raise Unsafe(f"{path} changed while it was opened")
    return fd


def open_in(folder: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Open a file of a folder, never through a link; a file must be regular, ours, and have one name. Does not block on a
    FIFO. Raises Unsafe or OSError."""
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise Unsafe(f"{name} is a symbolic link or a folder") from error
        raise
    found = os.fstat(fd)
    # no name at all: another process has put a new file in its place since it was opened; this one is whole all the same
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink > 1:
        os.close(fd)
        raise Unsafe(f"{name} is not a regular file of ours with one name")
    if found.st_mode & _OTHERS_WRITE:
        os.close(fd)
        raise Unsafe(f"{name} can be written by others")
    return fd


def read_all(fd: int, limit: int) -> bytes:
    """The file's bytes; Unsafe when there are more than `limit`."""
    parts: list[bytes] = []
    total = 0
    while True:
        part = os.read(fd, 1 << 20)
        if not part:
            return b"".join(parts)
        total += len(part)
        if total > limit:
            raise Unsafe(f"more than {limit} bytes")
        parts.append(part)


def write_all(fd: int, data: bytes) -> None:
    """All of `data`, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """A fresh private folder, removed afterwards whatever happens. Raises Unsafe where the system's place for temporary
    files is open to others."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        path = os.path.realpath(folder)
        reason = why_not_private(path)
        if reason:
            raise Unsafe(f"temporary files are not safe here: {reason}")
        yield path
