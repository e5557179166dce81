"""The disk cache: built kernels by content, safe under other users, crashes and concurrent processes.

One entry is one file, readable alone:

    plait-cache 1\\n   header: JSON on one line (key text, payload length, sha256)\\n   mac: 32 bytes   payload

named by the hash of its key text. The MAC is keyed BLAKE2b over header and payload, with a key (0600) that only this user
can read: a file written by someone else does not verify. What does not verify is moved to quarantine/ and is a miss.
Entries are published by writing a random temporary name, fsync, rename, fsync of the folder. No error of the cache ever
fails a compilation: what goes wrong is counted in `stats`, and where the folder cannot be used at all, one warning says so.

It does not defend against this user's own other programs, nor against root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from plait.ir.fault import is_planted
from plait.options import Options, cache_home
from plait.runtime import folders, report
from plait.runtime.folders import Unsafe
from plait.runtime.locks import Lock

FORMAT = b"plait-cache 1\n"
_MAC_BYTES = 32
_KEY_FILE = "key"
_ENTRIES, _QUARANTINE = "entries", "quarantine"
_MOST_BYTES = 1 << 30  # of one entry
_STALE_SECONDS = 3600.0  # a temporary file this old was left by a writer that died
_QUARANTINE_FILES = 16
# what network file systems answer when another process renamed or removed the file under us
_TRANSIENT = (errno.ESTALE, errno.EBUSY, errno.ENOENT)

T = TypeVar("T")


@dataclass
class Stats:
    """What happened in this process."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evicted: int = 0
    quarantined: int = 0
    errors: int = 0
    last_error: str = ""


class Cache:
    """A cache folder. `get` and `put` never raise; a Cache whose folder cannot be used answers None and stores nothing."""

    def __init__(self, folder: str | None, limit_bytes: int = 2 << 30) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.stats = Stats()
        self._lock = Lock()
        self._opened = False
        self._entries = self._quarantine = -1
        self._mac_key = b""
        self._size: int | None = None  # of all entries, as far as this process knows

    # ---------------------------------------------------------------- opening
    @property
    def usable(self) -> bool:
        """Whether entries can be read and written; opens the folder at the first call."""
        if self.folder is None:
            return False
        with self._lock:
            if not self._opened:
                self._opened = True
                try:
                    self._open(self.folder)
                except (Unsafe, OSError) as error:
                    self._entries = -1
                    self._note(error)
                    report.warn_once(f"plait compiles without a disk cache: {error}")
            return self._entries >= 0

    def _open(self, folder: str) -> None:
        top = folders.open_private(folder)
        try:
            self._mac_key = _user_key(top)
            for name in (_ENTRIES, _QUARANTINE):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=top)
            path = os.path.realpath(folder)
            self._quarantine = folders.open_private(os.path.join(path, _QUARANTINE))
            self._entries = folders.open_private(os.path.join(path, _ENTRIES))
        finally:
            os.close(top)

    def open_folder(self, name: str) -> int | None:
        """A descriptor, to be closed, of a private folder beside the entries, made if need be; None where there is no cache."""
        if not self.usable or self.folder is None:
            return None
        try:
            return folders.open_private(os.path.join(os.path.realpath(self.folder), name))
        except (Unsafe, OSError) as error:
            self._note(error)
            return None

    # ---------------------------------------------------------------- reading
    def get(self, key: str) -> bytes | None:
        """The payload stored under this key text, or None."""
        if not self.usable:
            return None
        name = entry_name(key)
        try:
            payload = _retry(lambda: self._read(name, key))
        except FileNotFoundError:
            payload = None
        except (Unsafe, ValueError) as error:
            self._note(error)
            self._move_to_quarantine(name)
            payload = None
        except OSError as error:
            self._note(error)
            payload = None
        with self._lock:
            self.stats.hits += payload is not None
            self.stats.misses += payload is None
        if payload is not None:
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self._entries, follow_symlinks=False)  # for least-recently-used eviction
        return payload

    def _read(self, name: str, key: str) -> bytes:
        fd = folders.open_in(self._entries, name, os.O_RDONLY)
        try:
            data = folders.read_all(fd, _MOST_BYTES)
        finally:
            os.close(fd)
        return decode(data, key, self._mac_key)

    # ---------------------------------------------------------------- writing
    def put(self, key: str, payload: bytes) -> bool:
        """Store; False (and nothing stored) when that is not possible."""
        if not self.usable or len(payload) > min(_MOST_BYTES, self.limit_bytes):
            return False
        name = entry_name(key)
        data = encode(key, payload, self._mac_key)
        temporary = f".{secrets.token_hex(12)}.tmp"
        try:
            fd = folders.open_in(self._entries, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                folders.write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self._entries, dst_dir_fd=self._entries)
        except BaseException as error:  # an interrupt as well must not leave the temporary file; raised again below
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._entries)
            if not isinstance(error, (OSError, Unsafe)):
                raise
            self._note(error)
            return False
        with contextlib.suppress(OSError):
            os.fsync(self._entries)
        with self._lock:
            self.stats.stores += 1
            self._make_room(len(data))
        return True

    def _make_room(self, added: int) -> None:
        """Evict the least recently used entries when the limit is passed; sizes are counted afresh only then."""
        if self._size is not None and self._size + added <= self.limit_bytes:
            self._size += added
            return
        found: list[tuple[float, str, int]] = []
        now = time.time()
        for name in self._names(self._entries):
            try:
                s = os.stat(name, dir_fd=self._entries, follow_symlinks=False)
                if name.endswith(".tmp"):
                    if now - s.st_mtime > _STALE_SECONDS:
                        os.unlink(name, dir_fd=self._entries)
                    continue
            except OSError:
                continue  # another process was faster
            found.append((s.st_mtime, name, s.st_size))
        total = sum(size for _, _, size in found)
        goal = self.limit_bytes * 9 // 10 if total > self.limit_bytes else self.limit_bytes
        for _, name, size in sorted(found):
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._entries)
                self.stats.evicted += 1
            total -= size
        self._size = total

    # ---------------------------------------------------------------- shared libraries
    def load_library(self, key: str) -> ctypes.CDLL | None:
        """The shared library stored under this key, loaded; None when it is not there."""
        payload = self.get(key)
        return None if payload is None else load_library_bytes(payload)

    # ---------------------------------------------------------------- upkeep
    def _names(self, folder: int) -> list[str]:
        try:
            return os.listdir(folder)
        except OSError as error:
            self._note(error)
            return []

    def _move_to_quarantine(self, name: str) -> None:
        with self._lock:
            self.stats.quarantined += 1
            try:
                kept = self._names(self._quarantine)
                if len(kept) >= _QUARANTINE_FILES:
                    os.unlink(name, dir_fd=self._entries)
                else:
                    os.rename(
                        name, f"{name}.{secrets.token_hex(4)}", src_dir_fd=self._entries, dst_dir_fd=self._quarantine
                    )
            except OSError as error:
                self._note(error)

    def _note(self, error: BaseException) -> None:
        with self._lock:
            self.stats.errors += 1
            self.stats.last_error = str(error)

    def summary(self) -> dict[str, Any]:
        """Where, how much, and what happened in this process; for `plait cache`."""
        sizes: list[int] = []
        quarantined = 0
        if self.usable:
            for name in self._names(self._entries):
                with contextlib.suppress(OSError):
                    sizes.append(os.stat(name, dir_fd=self._entries, follow_symlinks=False).st_size)
            quarantined = len(self._names(self._quarantine))
        return {
            "folder": self.folder,
            "usable": self.usable,
            "entries": len(sizes),
            "bytes": sum(sizes),
            "limit_bytes": self.limit_bytes,
            "in_quarantine": quarantined,
            **asdict(self.stats),
        }

    def prune(self, limit_bytes: int | None = None) -> int:
        """Remove the entries used longest ago, down to nine tenths of a limit that is passed; how many went."""
        if not self.usable:
            return 0
        with self._lock:
            before, own = self.stats.evicted, self.limit_bytes
            self._size, self.limit_bytes = None, own if limit_bytes is None else limit_bytes
            try:
                self._make_room(0)
            finally:
                self.limit_bytes = own
            return self.stats.evicted - before

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        removed = 0
        if self.usable:
            for folder in (self._entries, self._quarantine):
                for name in self._names(folder):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                        removed += folder == self._entries
        with self._lock:
            self._size = None
        return removed

    def verify(self) -> tuple[int, int]:
        """Check every entry against its own header and MAC, moving bad ones to quarantine: (good, bad)."""
        good = bad = 0
        if not self.usable:
            return 0, 0
        for name in self._names(self._entries):
            if name.endswith(".tmp"):
                continue
            try:
                fd = folders.open_in(self._entries, name, os.O_RDONLY)
                try:
                    data = folders.read_all(fd, _MOST_BYTES)
                finally:
                    os.close(fd)
                if entry_name(str(read_header(data)["key"])) != name:
                    raise ValueError("the entry's name is not its key's")
                decode(data, None, self._mac_key)
                good += 1
            except FileNotFoundError:
                continue
            except (Unsafe, ValueError, OSError):
                bad += 1
                self._move_to_quarantine(name)
        return good, bad


# -------------------------------------------------------------------------------------------------------- entry format
def entry_name(key: str) -> str:
    """The file name of a key text."""
    return hashlib.sha256(key.encode()).hexdigest()


def encode(key: str, payload: bytes, mac_key: bytes) -> bytes:
    """An entry's bytes."""
    header = json.dumps(
        {"key": key, "length": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}, sort_keys=True
    ).encode()
    signed = FORMAT + header + b"\n"
    return signed + _mac(mac_key, signed, payload) + payload


def read_header(data: bytes) -> dict[str, Any]:
    """The header of an entry, unverified. Raises ValueError when it is not one."""
    if not data.startswith(FORMAT):
        raise ValueError("not a plait cache entry of this format")
    end = data.find(b"\n", len(FORMAT))
    if end < 0:
        raise ValueError("an entry without a header")
    header = json.loads(data[len(FORMAT) : end])
    if not isinstance(header, dict) or not {"key", "length", "sha256"} <= header.keys():
        raise ValueError("a header without its fields")
    return header


def decode(data: bytes, key: str | None, mac_key: bytes) -> bytes:
    """The payload of an entry, everything verified (`key` None: any key). Raises ValueError."""
    header = read_header(data)
    start = data.find(b"\n", len(FORMAT)) + 1
    mac, payload = data[start : start + _MAC_BYTES], data[start + _MAC_BYTES :]
    if len(payload) != header["length"]:
        raise ValueError("an entry of the wrong length")
    if not hmac.compare_digest(mac, _mac(mac_key, data[:start], payload)):
        raise ValueError("an entry whose MAC does not verify")
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError("an entry whose hash does not verify")
    if key is not None and header["key"] != key:
        raise ValueError("an entry of another key")
    return payload


def _mac(mac_key: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(key=mac_key, digest_size=_MAC_BYTES)
    for p in parts:
        state.update(p)
    return state.digest()


def _user_key(folder: int) -> bytes:
    """This user's MAC key, made on first use."""
    key = _read_key(folder)
    if key is None:
        with folder_lock(folder):
            key = _read_key(folder)  # another process may have made it meanwhile
            if key is None:
                _make_key(folder)
                key = _read_key(folder)
    if key is None:
        raise Unsafe("the cache's key cannot be made")
    return key


def _read_key(folder: int) -> bytes | None:
    try:
        fd = folders.open_in(folder, _KEY_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_mode & 0o077:
            raise Unsafe("the cache's key can be read by others")
        key = folders.read_all(fd, 64)
    finally:
        os.close(fd)
    # one of another length is not ours: nothing verifies with it, so a new one loses nothing
    return key if len(key) == 32 else None


def _make_key(folder: int) -> None:
    temporary = f".{secrets.token_hex(12)}.tmp"
    fd = folders.open_in(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        folders.write_all(fd, secrets.token_bytes(32))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, _KEY_FILE, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def folder_lock(folder: int) -> Iterator[None]:
    """Advisory, to avoid double work only: where locks do not work or a holder hangs, the work is done all the same."""
    for _ in range(200):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        except OSError:
            break
        try:
            yield
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)
        return
    yield


def _retry(action: Callable[[], T]) -> T:
    """Once more after an answer that another process's rename can cause."""
    try:
        return action()
    except OSError as error:
        if error.errno not in _TRANSIENT:
            raise
        return action()


# ------------------------------------------------------------------------------------------------------------- loading
def load_library_bytes(data: bytes) -> ctypes.CDLL:
    """dlopen exactly these bytes: from a private folder, which is removed at once, or, where that is not to be had or may
    not be executed from, from a sealed anonymous file. Raises OSError when it is no library."""
    try:
        with folders.scratch_folder("plait-lib-") as folder:
            # dlopen takes two files of one name for one library: the folder's random name keeps them apart
            path = os.path.join(folder, "library.so")
            with open(path, "xb") as out:
                out.write(data)
            return ctypes.CDLL(path)
    except (OSError, Unsafe):
        if not hasattr(os, "memfd_create"):
            raise
        return _load_from_memory(data)


def _load_from_memory(data: bytes) -> ctypes.CDLL:
    fd = os.memfd_create("plait", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        folders.write_all(fd, data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        # the descriptor stays open while the library is loaded, so that no other gets the same name
        return ctypes.CDLL(f"/proc/self/fd/{fd}")
    except OSError:
        os.close(fd)
        raise


# ---------------------------------------------------------------------------------------------------- one for a process
_caches: dict[tuple[str | None, int], Cache] = {}
_caches_lock = Lock()


def cache_for(options: Options) -> Cache:
    """The Cache these options name, one a folder and process."""
    folder = options.cache_dir or os.path.join(cache_home(), "plait")
    where = None if folder == "0" or is_planted() else os.path.abspath(folder)
    with _caches_lock:
        found = _caches.get((where, options.cache_mb))
        if found is None:
            found = _caches[where, options.cache_mb] = Cache(where, options.cache_mb << 20)
        return found
