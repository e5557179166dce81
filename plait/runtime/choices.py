"""Remembered choices: which build of a kernel was fastest on a kind of device, in a text file that can be read, joined and edited.

One file a kind of device (name and compute capability) in the cache's folder tuned/, one line a choice, tabs between the fields:

    key   kernel   schedule   its median; the others' and their schedules, in microseconds   date

The last line about a key wins, so that files are joined by writing one behind the other; lines that begin with # are
comments. The key is a hash of everything that is compiled and of the device, so that a line about other code never
applies. A line that cannot be read is counted and passed over. Nothing here is executed: the worst that a planted line
could do is pick a slower build of the same kernel, so lines carry no MAC; the folder's rules are the cache's. As there,
no error is raised: what goes wrong is counted in `stats`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from plait.errors import BadOption
from plait.ir.fault import is_planted
from plait.options import Options
from plait.runtime import folders, report
from plait.runtime.cache import Cache, cache_for, folder_lock
from plait.runtime.folders import Unsafe
from plait.runtime.locks import Lock

FOLDER = "tuned"
_MOST_BYTES = 16 << 20  # of a file
_LARGE_BYTES = 1 << 20  # a file beyond this is written anew, without what was replaced
_MOST_KEPT = 4096  # choices then, the newest
_MOST_LINE = 8192
_KEY, _DATE = re.compile(r"[0-9a-f]{32}"), re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest of a kernel's builds. `times_us`: schedule -> median of every build that was timed, the chosen one first."""

    key: str
    kernel: str
    times_us: tuple[tuple[str, float], ...]
    date: str

    @property
    def name(self) -> str:
        """The schedule that is used."""
        return self.times_us[0][0]

    def __str__(self) -> str:
        first, *others = self.times_us
        times = "; ".join([f"{first[1]:.3f}", *(f"{us:.3f} {name}" for name, us in others)])
        return "\t".join([self.key, self.kernel, first[0], times, self.date])


def parse_choice(line: str) -> Choice:
    """Inverse of str(). Raises ValueError."""
    key, kernel, name, times, date = line.split("\t")
    if len(line) > _MOST_LINE or not line.isascii() or not line.replace("\t", "").isprintable():
        raise ValueError("not a line of text")
    if not (_KEY.fullmatch(key) and kernel and name and _DATE.fullmatch(date)):
        raise ValueError("not a choice")
    own, *others = times.split("; ")
    found = [(name, float(own))]
    for entry in others:
        us, _, other = entry.partition(" ")
        found.append((other, float(us)))
    if not all(n and math.isfinite(us) and us > 0 for n, us in found):
        raise ValueError("not a time")
    return Choice(key, kernel, tuple(found), date)


def parse_choices(data: bytes) -> tuple[dict[str, Choice], int]:
    """The choices of a file by their keys, and how many lines could not be read. What stands behind the last line break is being
    written, or was when its writer died: taken where it is whole, else not counted."""
    found: dict[str, Choice] = {}
    bad = 0
    *lines, last = data.decode("ascii", errors="replace").split("\n")
    for number, line in enumerate([*lines, last]):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        try:
            choice = parse_choice(line)
        except ValueError:
            bad += number < len(lines)
            continue
        found.pop(choice.key, None)  # so that the order is that of the last lines
        found[choice.key] = choice
    return found, bad


def file_text(device: str, choices: Iterable[Choice]) -> str:
    """A whole file."""
    head = f"# plait tuned 1, {device}: key, kernel, schedule, its median and the others' in us, date\n"
    return head + "".join(f"{c}\n" for c in choices)


def content_key(device: str, sources: Iterable[Sequence[object]]) -> str:
    """What a choice holds for: a kind of device and everything that is compiled for the launch."""
    text = repr([device, *sources])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def device_kind(device: str) -> str:
    """The name of the card and its compute capability."""
    if not device.startswith("cuda"):
        return device
    found = torch.cuda.get_device_properties(torch.device(device))
    return f"{found.name} {found.major}.{found.minor}"


@dataclass
class Stats:
    """What happened in this process. `bad_lines`: of the file as it was read last."""

    stores: int = 0
    bad_lines: int = 0
    errors: int = 0
    last_error: str = ""


class Choices:
    """The choices for one kind of device, those of `extra` (a file's, read-only) before all. `get` and `put` never raise; where the
    cache cannot be used they hold for this process."""

    def __init__(self, cache: Cache, device: str, extra: dict[str, Choice] | None = None) -> None:
        self.cache, self.device, self.extra = cache, device, extra or {}
        self.stats = Stats()
        self.file = re.sub(r"[^A-Za-z0-9.]+", "_", device)[:100].strip("._") + ".txt"
        self._known: dict[str, Choice] = {}
        self._seen: tuple[int, ...] = ()  # the file's state when it was read
        self._lock = Lock()

    @property
    def path(self) -> str | None:
        """Where choices are kept; None where they are not."""
        usable = self.cache.folder is not None and self.cache.usable
        return os.path.join(str(self.cache.folder), FOLDER, self.file) if usable else None

    def get(self, key: str) -> Choice | None:
        """The choice under a key, whichever process made it."""
        with self._lock:
            if key in self.extra:
                return self.extra[key]
            if key not in self._known:
                self._with_folder(self._read)
            return self._known.get(key)

    def put(self, choice: Choice) -> None:
        """Remember a choice."""
        with self._lock:
            self._known.pop(choice.key, None)
            self._known[choice.key] = choice
            self._with_folder(lambda folder: self._append(folder, choice))

    # ---------------------------------------------------------------- the file
    def _with_folder(self, do: Callable[[int], None]) -> None:
        """Opened, and so checked, anew each time: a forked child would share its parent's locks on a descriptor."""
        folder = self.cache.open_folder(FOLDER)
        if folder is None:
            return
        try:
            do(folder)
        except FileNotFoundError:
            pass
        except (Unsafe, OSError) as error:
            self.stats.errors += 1
            self.stats.last_error = str(error)
        finally:
            os.close(folder)

    def _read(self, folder: int) -> None:
        fd = folders.open_in(folder, self.file, os.O_RDONLY)
        try:
            found = os.fstat(fd)
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            data = folders.read_all(fd, _MOST_BYTES)
        finally:
            os.close(fd)
        self._seen = seen
        choices, self.stats.bad_lines = parse_choices(data)
        self._known.update(choices)

    def _append(self, folder: int, choice: Choice) -> None:
        with folder_lock(folder):
            try:
                fd = folders.open_in(folder, self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            except Unsafe:
                # the folder is ours alone: a link or the like in it is a mistake, and is replaced
                self._rewrite(folder)
                self.stats.stores += 1
                return
            try:
                size = os.fstat(fd).st_size
                # behind a line that was broken off, a new one begins; one write, so that others' lines stay whole
                broken = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                text = "\n" * broken + f"{choice}\n" if size else file_text(self.device, [choice])
                folders.write_all(fd, text.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            self.stats.stores += 1
            if size > _LARGE_BYTES:
                with contextlib.suppress(Unsafe):  # more than is ever read: only what this process knows is left
                    self._read(folder)
                self._rewrite(folder)

    def _rewrite(self, folder: int) -> None:
        """Put the newest choices, each once, in the file's place."""
        temporary = f".{secrets.token_hex(12)}.tmp"
        newest = list(self._known.values())[-_MOST_KEPT:]
        try:
            fd = folders.open_in(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                folders.write_all(fd, file_text(self.device, newest).encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, self.file, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


class Note:
    """What is remembered of one kernel, under its key."""

    def __init__(self, choices: Choices, key: str, kernel: str) -> None:
        self.choices, self.key, self.kernel = choices, key, re.sub(r"[^!-~]+", "_", kernel) or "_"

    def known(self, names: Sequence[str]) -> Choice | None:
        """The choice, if its schedule is among `names`."""
        found = self.choices.get(self.key)
        return found if found is not None and found.name in names else None

    def keep(self, name: str, times_us: dict[str, float]) -> None:
        """Remember that `name` is used."""
        others = [(n, us) for n, us in times_us.items() if n != name]
        today = time.strftime("%Y-%m-%d", time.gmtime())
        self.choices.put(Choice(self.key, self.kernel, ((name, times_us[name]), *others), today))


# ---------------------------------------------------------------------------------------------------- one for a process
_all: dict[tuple[Cache, str, str], Choices] = {}
_all_lock = Lock()


def choices_for(options: Options, device: str) -> Choices | None:
    """The choices that these options name; None where nothing is remembered. Raises BadOption for a file that cannot be read."""
    if options.tuned == "off" or is_planted():
        return None
    extra = "" if options.tuned == "remember" else os.path.abspath(options.tuned)
    key = (cache_for(options), device_kind(device), extra)
    with _all_lock:
        if key not in _all:
            _all[key] = Choices(key[0], key[1], read_file(extra) if extra else None)
        return _all[key]


def read_file(path: str) -> dict[str, Choice]:
    """The choices of a file that the user names, whoever it belongs to. Raises BadOption."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Unsafe("it is no regular file")
            data = folders.read_all(fd, _MOST_BYTES)
        finally:
            os.close(fd)
    except (OSError, Unsafe) as error:
        why = getattr(error, "strerror", None) or error
        raise BadOption(f"tuned is {path!r}, which cannot be read: {why}", hint="plait tune --out makes one") from error
    found, bad = parse_choices(data)
    if bad:
        report.warn_once(f"plait passes over {bad} of the lines of {path}: they are no choices of plait tune")
    return found
