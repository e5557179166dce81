"""Options: every choice a user can make, validated, and the only place that reads the environment.

An explicit option wins over an environment variable, which wins over the default. Free of torch: reading options costs
nothing, so command-line tools can do it before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from plait.errors import BadOption
from plait.levels import ALIASES, DEFAULT, GRAPHS, LEVELS, Level

MODES = (*LEVELS, *ALIASES)
STAGES = ("graph", "plan", "tile", "source")
BACKENDS = ("auto", "cpp", "triton", "eval")

# variable -> (option it sets, what it does); the documentation's table and the tests are made from this
ENVIRONMENT: dict[str, tuple[str, str]] = {
    "PLAIT_MODE": ("mode", "O0 to O3: what compiling spends time on; fast-compile is O1, default O2, max O3"),
    "PLAIT_NUMERICS": ("numerics", "fused keeps float32 inside a kernel; eager rounds wherever eager would"),
    "PLAIT_RNG": ("rng", "plait draws random numbers inside kernels; eager gives eager's numbers"),
    "PLAIT_STRICT": ("strict", "1: raise instead of falling back to eager"),
    "PLAIT_BACKEND": ("backend", "auto, cpp, triton, or eval (the reference evaluator)"),
    "PLAIT_PLAN": ("plan", "greedy, or none: one operator a kernel"),
    "PLAIT_CHECK": (
        "check",
        "0 none, 1 level boundaries, 2 after each pass, 3 evaluate and compare, 4 after each rule",
    ),
    "PLAIT_DUMP": ("dump", "stages to write as text: graph,plan,tile,source[@dir]"),
    "PLAIT_OVERRIDE": ("override", "folder of dumped stages that replace what is computed"),
    "PLAIT_CACHE": ("cache_dir", "folder of the disk cache, and its size limit in MiB: folder[@2048]; 0 turns it off"),
    "PLAIT_GROUPS": ("groups", "compile only these groups (3,5 or 0-7), the rest runs in eager: for bisection"),
    "PLAIT_EXPLAIN": ("explain", "1: print one line for every compiled graph, and on a terminal how far it is"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The effective settings of one compilation. Build with `Options.make`."""

    mode: str = DEFAULT  # a level's name (plait/levels.py)
    numerics: str = "fused"
    rng: str = "plait"
    strict: bool = False
    backend: str = "auto"
    plan: str = "greedy"
    check: int = 1
    dump: tuple[str, ...] = ()
    dump_dir: str = "plait_dump"
    override: str = ""  # folder of a dump whose files replace what is computed
    cache_dir: str | None = None  # None: the platform's place; "0": no disk cache
    cache_mb: int = 2048
    groups: tuple[int, ...] | None = None
    budget: float | None = (
        None  # seconds of compiling in this process, after which the rest is compiled the cheapest way
    )
    memory: int | None = None  # MB beyond inputs and outputs that each graph may hold; 0: the least; None: time decides
    fuel: int | None = None  # decisions that each graph's compilation may take, for bisection; None: all
    forbid: tuple[tuple[str, ...], ...] = ()
    force: tuple[tuple[str, ...], ...] = ()
    pin: tuple[tuple[str, str], ...] = ()
    explain: bool = False
    gluon: str = "measured"
    tuned: str = "remember"  # or "off", or a file of choices that are taken first
    threads: int | None = None  # None: as many as torch uses at the time of the call
    cuda_graphs: bool | None = None  # None: at O3 only
    pool_mb: int = 1024  # bytes of dead CPU outputs that are kept for the next call, in MiB; 0 turns the pool off

    @classmethod
    def make(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """Defaults, then the environment, then `options`, then `mode`. Raises BadOption with the nearest name."""
        found: dict[str, Any] = {}
        for variable, (name, _) in ENVIRONMENT.items():
            text = os.environ.get(variable)
            if text is not None and text != "":
                found.update(_parse(name, text, variable))
        for key, value in (options or {}).items():
            name = key.replace("-", "_")
            if name not in _FIELDS:
                raise BadOption(
                    f"unknown option {key!r}", hint=_nearest(name, _FIELDS) + f"options: {', '.join(_FIELDS)}"
                )
            found.update(_parse(name, value, key))
        if mode is not None:
            found.update(_parse("mode", mode, "mode"))
        named = found.get("mode", DEFAULT)
        if named in GRAPHS:
            found.setdefault("cuda_graphs", GRAPHS[named])
        return replace(cls(), **{**found, "mode": ALIASES.get(named, named)})

    @property
    def level(self) -> Level:
        """What compiling spends time on."""
        return LEVELS[self.mode]

    @property
    def fuses(self) -> bool:
        """Whether operators share kernels."""
        return self.level.fuse and self.plan != "none"

    @property
    def opens_products(self) -> bool:
        """Whether products that are library calls may become parts of kernels."""
        return self.fuses and self.level.open_products

    def codegen_key(self) -> str:
        """The settings that can change generated code, as text for cache keys."""
        return (
            f"mode={self.mode} numerics={self.numerics} rng={self.rng} backend={self.backend} plan={self.plan} "
            f"gluon={self.gluon} fuel={self.fuel} memory={self.memory} forbid={self.forbid} force={self.force} pin={self.pin} "
            f"override={self.override}"
        )

    def pinned(self, kernel: str, kind: str) -> str | None:
        """The schedule that the user wants for a kernel of a graph of this kind."""
        side = "backward" if kind == "backward" else "forward"
        pins = dict(self.pin)
        return pins.get(f"{side}/{kernel}", pins.get(kernel))

    @property
    def records_graphs(self) -> bool:
        """Whether runs are recorded as CUDA graphs where they can be."""
        return self.level.cuda_graphs if self.cuda_graphs is None else self.cuda_graphs

    def as_dict(self) -> dict[str, Any]:
        """Name → value, for reports and `get_compiler_config`."""
        return {f: getattr(self, f) for f in _FIELDS}


_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Options))
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": MODES,
    "numerics": ("fused", "eager"),
    "rng": ("plait", "eager"),
    "backend": BACKENDS,
    "plan": ("greedy", "none"),
    "gluon": ("measured", "all", "off"),
}
_BOOLS = ("strict", "explain", "cuda_graphs")
_INTS: dict[str, tuple[int, int]] = {
    "check": (0, 4),
    "cache_mb": (1, 1 << 30),
    "threads": (1, 4096),
    "pool_mb": (0, 1 << 30),
    "fuel": (0, 1 << 30),
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _parse(name: str, value: Any, given_as: str) -> dict[str, Any]:
    """The field values that a given value stands for."""
    if name in _CHOICES:
        choices = _CHOICES[name]
        if value not in choices:
            raise BadOption(
                f"{given_as} is {value!r}", hint=_nearest(str(value), choices) + f"values: {', '.join(choices)}"
            )
        return {name: value}
    if name in _BOOLS:
        if isinstance(value, bool) or (value is None and name == "cuda_graphs"):
            return {name: value}
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise BadOption(f"{given_as} is {value!r}", hint="values: 0 or 1")
        return {name: text in _TRUE}
    if name == "memory":
        return {name: _parse_memory(value, given_as)}
    if name == "budget":
        return {name: _parse_seconds(value, given_as)}
    if name in _INTS:
        return _parse_int(name, value, given_as)
    if name == "dump":
        return _parse_dump(value, given_as)
    if name in ("forbid", "force"):
        return {name: _parse_names(value, given_as)}
    if name == "pin":
        return {name: _parse_pins(value, given_as)}
    if name == "groups":
        return {name: _parse_groups(value, given_as)}
    if name == "override" and not value:
        return {name: ""}
    if name == "tuned":
        return {name: _parse_tuned(value, given_as)}
    if name == "cache_dir" and isinstance(value, str) and (m := re.fullmatch(r"(.*)@(\d+)", value)) is not None:
        return {**({name: m[1]} if m[1] else {}), **_parse_int("cache_mb", m[2], given_as)}
    if value is None and name == "cache_dir":
        return {name: None}
    if name == "cache_dir" and value is False:
        return {name: "0"}
    if not isinstance(value, (str, os.PathLike)):
        raise BadOption(f"{given_as} is {value!r}", hint="it takes a folder")
    return {name: os.fspath(value)}


def _parse_int(name: str, value: Any, given_as: str) -> dict[str, Any]:
    low, high = _INTS[name]
    if value is None and name in ("threads", "fuel"):
        return {name: None}
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = low - 1
    if isinstance(value, (bool, float)) or not low <= number <= high:
        raise BadOption(f"{given_as} is {value!r}", hint=f"a whole number from {low} to {high}")
    return {name: number}


def _parse_seconds(value: Any, given_as: str) -> float | None:
    if value is None:
        return None
    try:
        seconds = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise BadOption(f"{given_as} is {value!r}", hint="seconds, 0 or more")
    return seconds


def _parse_memory(value: Any, given_as: str) -> int | None:
    """MB, or a word: auto is none at all, least is 0."""
    if value is None or value == "auto":
        return None
    found = 0 if value == "least" else int(value) if str(value).isdigit() else -1
    if isinstance(value, bool) or found < 0:
        raise BadOption(f"{given_as} is {value!r}", hint="a whole number of MB, least, or auto")
    return found


def _parse_dump(value: Any, given_as: str) -> dict[str, Any]:
    if not isinstance(value, str):
        value = ",".join(str(v) for v in value)
    stages, at, folder = value.partition("@")
    names = tuple(s.strip() for s in stages.split(",") if s.strip())
    if names in (("1",), ("all",)):
        names = STAGES
    for n in names:
        if n not in STAGES:
            raise BadOption(
                f"{given_as} names the stage {n!r}", hint=_nearest(n, STAGES) + f"stages: {', '.join(STAGES)}"
            )
    return {"dump": names, **({"dump_dir": folder} if at and folder else {})}


def _parse_groups(value: Any, given_as: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = ",".join(str(v) for v in value)
    out: set[int] = set()
    for part in filter(None, (p.strip() for p in value.split(","))):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise BadOption(f"{given_as} holds {part!r}", hint="numbers and ranges, such as 3,5 or 0-7")
        out.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(out))


def _parse_names(value: Any, given_as: str) -> tuple[tuple[str, ...], ...]:
    """Groups of names: a list of names and of lists of names, or text, "softmax, mul; layers.*.mlp"."""
    if isinstance(value, str):
        value = [entry.split(",") for entry in value.split(";")]
    if not isinstance(value, (list, tuple)):
        raise BadOption(
            f"{given_as} is {value!r}", hint='a list of names and of pairs, such as ["norm", ("softmax", "mul")]'
        )
    out: list[tuple[str, ...]] = []
    for entry in value:
        names = [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, (list, tuple)) else [None]
        if not all(isinstance(n, str) for n in names):
            raise BadOption(f"{given_as} holds {entry!r}", hint="a name, or several names")
        found = tuple(str(n).strip() for n in names if n)
        if len(set(found)) < len(found):
            raise BadOption(
                f"{given_as} holds {entry!r}", hint="each name once; alone, a name is kept apart from all else"
            )
        out += [found] if found else []
    return tuple(out)


def _parse_pins(value: Any, given_as: str) -> tuple[tuple[str, str], ...]:
    """Kernels and their schedules: a dict, or text, "k0_exp = form=flat tile=p0:64; ..."."""
    if isinstance(value, str):
        pairs = (entry.partition("=") for entry in value.split(";") if entry.strip())
        value = {kernel.strip(): schedule.strip() for kernel, _, schedule in pairs}
    if isinstance(value, (list, tuple)):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for kv in value.items() for x in kv):
        raise BadOption(f"{given_as} is {value!r}", hint="kernels and their schedules, as plait explain prints them")
    return tuple(sorted(value.items()))


def _parse_tuned(value: Any, given_as: str) -> str:
    """A word, or a file that is there."""
    if isinstance(value, (str, os.PathLike)) and (value in ("remember", "off") or os.path.isfile(value)):
        return os.fspath(value)
    raise BadOption(
        f"{given_as} is {value!r}",
        hint=_nearest(str(value), ("remember", "off")) + "remember, off, or a file that plait tune --out wrote",
    )


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def cache_home() -> str:
    """Where caches live on this platform, before our own folder name."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")


def cxx_command() -> tuple[str, ...]:
    """The C++ compiler: $CXX (which may carry arguments), else g++ from the path."""
    return tuple(shlex.split(os.environ.get("CXX", ""))) or ("g++",)


def triton_is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in _TRUE


def interpret_triton() -> None:
    """Have Triton kernels that are made from now on run in its interpreter. Triton must not be imported yet."""
    os.environ["TRITON_INTERPRET"] = "1"


def digest(text: str) -> str:
    """A short name for a piece of text, for file names."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
