"""The disk cache against everything that can go wrong: corruption, hostile folders, dying and competing processes, full disks."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from plait.options import Options
from plait.runtime import cache as cache_module
from plait.runtime import folders, report
from plait.runtime.cache import Cache, cache_for, decode, encode, entry_name, load_library_bytes

KEY = json.dumps({"kind": "test", "n": 1})


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    report.reset()
    yield
    report.reset()


@pytest.fixture()
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder all of whose ancestors are private (pytest's own place may not be, so it is checked)."""
    assert folders.why_not_private(str(tmp_path)) is None
    return tmp_path / "cache"


def entry(home: pathlib.Path, key: str = KEY) -> pathlib.Path:
    return home / "entries" / entry_name(key)


def test_what_is_stored_is_found_by_another_cache(home: pathlib.Path) -> None:
    one = Cache(str(home))
    assert one.get(KEY) is None
    assert one.put(KEY, b"payload")
    two = Cache(str(home))
    assert two.get(KEY) == b"payload"
    assert two.get(KEY + " ") is None
    assert (two.stats.hits, two.stats.misses, two.stats.errors) == (1, 1, 0)
    assert (home.stat().st_mode & 0o777, entry(home).stat().st_mode & 0o777) == (0o700, 0o600)
    assert (home / "key").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in (home / "entries").iterdir()) == [entry_name(KEY)]
    assert two.summary()["entries"] == 1
    assert two.verify() == (1, 0)
    assert two.clear() == 1
    assert two.get(KEY) is None


def test_every_flipped_bit_is_noticed(home: pathlib.Path) -> None:
    good = encode(KEY, b"the payload", b"k" * 32)
    assert decode(good, KEY, b"k" * 32) == b"the payload"
    for place in range(len(good)):
        for bit in (0, 3, 7):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                decode(bytes(bad), KEY, b"k" * 32)
    for length in range(len(good)):
        with pytest.raises(ValueError, match=r"."):
            decode(good[:length], KEY, b"k" * 32)
    with pytest.raises(ValueError, match="MAC"):
        decode(good, KEY, b"x" * 32)
    with pytest.raises(ValueError, match="length"):
        decode(good + b" ", KEY, b"k" * 32)


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def _other_key(path: pathlib.Path) -> None:
    # a well-formed entry of this user, moved to another key's name
    other = Cache(str(path.parent.parent))
    other.put("another key", b"evil")
    os.rename(path.parent / entry_name("another key"), path)


def _forged(path: pathlib.Path) -> None:
    path.write_bytes(encode(KEY, b"evil", b"guess" * 6))


def _symlink(path: pathlib.Path) -> None:
    copy = path.parent.parent / "elsewhere"
    os.rename(path, copy)
    path.symlink_to(copy)


def _hard_link(path: pathlib.Path) -> None:
    os.link(path, path.parent.parent / "second-name")


def _fifo(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def _writable(path: pathlib.Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "harm", [_flip, _truncate, _empty, _other_key, _forged, _symlink, _hard_link, _fifo, _folder, _writable]
)
def test_bad_entry_is_a_miss_and_is_replaced(home: pathlib.Path, harm: Callable[[pathlib.Path], None]) -> None:
    Cache(str(home)).put(KEY, b"payload")
    harm(entry(home))
    store = Cache(str(home))
    assert store.get(KEY) is None
    assert store.stats.quarantined == 1
    assert not entry(home).exists() or entry(home).is_symlink() is False
    assert len(list((home / "quarantine").iterdir())) == 1
    assert store.put(KEY, b"payload")
    assert store.get(KEY) == b"payload"


def test_quarantine_stays_small(home: pathlib.Path) -> None:
    store = Cache(str(home))
    for k in range(40):
        store.put(f"key {k}", b"x")
        _flip(entry(home, f"key {k}"))
        assert store.get(f"key {k}") is None
    assert len(list((home / "quarantine").iterdir())) <= 16
    assert not list((home / "entries").iterdir())


def _is_uncached(folder: pathlib.Path, words: str) -> None:
    store = Cache(str(folder))
    with pytest.warns(UserWarning, match="without a disk cache") as seen:
        assert store.get(KEY) is None
    assert words in str(seen[0].message)
    assert not store.put(KEY, b"x")
    assert store.load_library(KEY) is None
    assert len(seen) == 1
    report.reset()


def test_hostile_folders_are_not_used(tmp_path: pathlib.Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    _is_uncached(open_to_all / "cache", "can be written by others")
    _is_uncached(open_to_all, "can be written by others")
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    _is_uncached(tmp_path / "link", "symbolic link")
    (tmp_path / "file").write_text("")
    _is_uncached(tmp_path / "file", "file")
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o700)
    (planted / "entries").symlink_to(real)
    _is_uncached(planted, "symbolic link")
    readable = tmp_path / "readable"
    assert Cache(str(readable)).put(KEY, b"x")
    (readable / "key").chmod(0o644)
    _is_uncached(readable, "key can be read by others")


def test_sticky_ancestor_is_fine(tmp_path: pathlib.Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert Cache(str(shared / "mine")).put(KEY, b"x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_other_owners_are_not_trusted(tmp_path: pathlib.Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    _is_uncached(foreign / "cache", "belongs to user 12345")
    mine = tmp_path / "mine"
    store = Cache(str(mine))
    store.put(KEY, b"x")
    os.chown(entry(mine), 12345, 12345)
    assert store.get(KEY) is None
    assert store.stats.quarantined == 1


def test_key_of_the_wrong_length_is_made_anew(home: pathlib.Path) -> None:
    Cache(str(home)).put(KEY, b"old")
    (home / "key").write_bytes(b"short")
    store = Cache(str(home))
    assert store.get(KEY) is None
    assert store.put(KEY, b"new")
    assert Cache(str(home)).get(KEY) == b"new"


def test_full_disk_and_vanished_folder_never_raise(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(str(home))
    store.put("first", b"x")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, bytes(data)[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_all", full)
        assert not store.put(KEY, b"payload")
    assert "No space left" in store.stats.last_error
    assert [p.name for p in (home / "entries").iterdir()] == [entry_name("first")]
    shutil.rmtree(home)
    assert not store.put(KEY, b"payload")
    assert store.get(KEY) is None
    assert store.summary()["entries"] == 0


def test_interrupt_leaves_no_temporary_file(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(str(home))
    store.put("first", b"x")

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(KEY, b"payload")
    assert [p.name for p in (home / "entries").iterdir()] == [entry_name("first")]


def test_stale_file_handle_is_tried_once_more(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(str(home))
    store.put(KEY, b"payload")
    calls = []
    whole = folders.open_in

    def flaky(*args: int, **kwargs: int) -> int:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return whole(*args, **kwargs)

    monkeypatch.setattr(folders, "open_in", flaky)
    assert store.get(KEY) == b"payload"
    assert len(calls) == 2


def test_least_recently_used_go_first(home: pathlib.Path) -> None:
    store = Cache(str(home), limit_bytes=20_000)
    for k in range(30):
        assert store.put(f"key {k}", b"x" * 1000)
        then = time.time() - 1000 + k
        os.utime(entry(home, f"key {k}"), (then, then))
        assert store.get("key 0") == b"x" * 1000  # used all the time
    assert sum(p.stat().st_size for p in (home / "entries").iterdir()) <= 20_000
    assert store.get("key 29") is not None
    assert store.get("key 1") is None
    assert store.stats.evicted > 0
    assert not store.put("too large", b"x" * 30_000)


def test_orphan_of_a_dead_writer_is_swept(home: pathlib.Path) -> None:
    store = Cache(str(home), limit_bytes=10_000)
    store.put("first", b"x")
    old, new = home / "entries" / ".old.tmp", home / "entries" / ".new.tmp"
    for p, age in ((old, 7200), (new, 10)):
        p.write_bytes(b"half")
        os.utime(p, (time.time() - age, time.time() - age))
    for k in range(12):
        store.put(f"key {k}", b"x" * 900)
    assert not old.exists()
    assert new.exists()


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def test_processes_write_and_read_one_folder_at_once(home: pathlib.Path) -> None:
    payloads = {f"key {k}": bytes([k]) * (1000 * k + 1) for k in range(8)}

    def work(seed: int) -> Callable[[], None]:
        def run() -> None:
            store = Cache(str(home), limit_bytes=60_000)
            for turn in range(40):
                key = f"key {(seed * 3 + turn) % 8}"
                found = store.get(key)
                assert found in (None, payloads[key])
                assert store.put(key, payloads[key])
            assert store.stats.quarantined == 0, store.stats
            os._exit(0 if store.stats.errors == 0 else 2)

        return run

    pids = [_fork(work(k)) for k in range(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids] == [0] * 4
    store = Cache(str(home))
    assert store.verify()[1] == 0
    assert not [p for p in (home / "entries").iterdir() if p.name.endswith(".tmp")]


def test_killed_writers_leave_a_folder_that_works(home: pathlib.Path) -> None:
    def run() -> None:
        store = Cache(str(home))
        while True:
            store.put(KEY, os.urandom(200_000))

    for delay in (0.02, 0.05, 0.09, 0.16):
        pid = _fork(run)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        store = Cache(str(home))
        found = store.get(KEY)
        assert found is None or len(found) == 200_000
        assert store.stats.quarantined == 0
    assert store.put(KEY, b"after")
    assert store.get(KEY) == b"after"


def test_fork_while_another_thread_holds_the_lock(home: pathlib.Path) -> None:
    store = Cache(str(home))
    store.put(KEY, b"x")
    with store._lock:
        pid = _fork(lambda: os._exit(0 if store.get(KEY) == b"x" else 3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _library(tmp_path: pathlib.Path, answer: int) -> bytes:
    source, made = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text(f"int answer(void) {{ return {answer}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made.read_bytes()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_libraries_load_from_checked_bytes_alone(
    home: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cache(str(home))
    for n in (41, 42, 43):
        store.put(f"library {n}", _library(tmp_path, n))
    loaded = {n: store.load_library(f"library {n}") for n in (41, 42, 43)}
    assert {n: lib.answer() for n, lib in loaded.items()} == {n: n for n in loaded}
    monkeypatch.setattr(folders, "scratch_folder", _no_scratch)
    sealed = [load_library_bytes(_library(tmp_path, n)) for n in (51, 52)]
    assert [lib.answer() for lib in sealed] == [51, 52]
    with pytest.raises(OSError, match=r"."):
        load_library_bytes(b"no library")
    assert all(isinstance(lib, ctypes.CDLL) for lib in sealed)


def _no_scratch(prefix: str) -> None:
    raise folders.Unsafe("not here")


def test_options_choose_the_folder(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache_for(Options.make(None, {"cache_dir": str(home), "cache_mb": 3}))
    assert store is cache_for(Options.make(None, {"cache_dir": str(home), "cache_mb": 3}))
    assert (store.folder, store.limit_bytes) == (str(home), 3 << 20)
    off = cache_for(Options.make(None, {"cache_dir": "0"}))
    assert not off.usable
    assert off.put(KEY, b"x") is False
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv("PLAIT_CACHE", raising=False)
    assert cache_for(Options.make()).folder == str(home / "plait")


def test_cache_module_does_not_import_torch() -> None:
    code = "import sys, plait.runtime.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert cache_module.FORMAT.endswith(b"\n")


def test_a_file_replaced_while_it_is_opened_is_still_ours(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(str(home))
    assert store.put(KEY, b"one")
    real = os.fstat

    def replaced_first(fd: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", real)
        other = Cache(str(home))
        assert other.put(KEY, b"one")
        return real(fd)

    monkeypatch.setattr(os, "fstat", replaced_first)
    assert store.get(KEY) == b"one"
    assert store.stats.quarantined == 0
