"""`plait doctor`: what this machine has and lacks for plait, each lack with its remedy, and one kernel run to prove it."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.options import Options, cache_home, cxx_command
from plait.tools.plain import as_json as to_json

OK, NOTE, BAD = "ok", "note", "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `state`: ok; note: plait works without it; BAD: it does not. `remedy`: what to do about it."""

    what: str
    state: str
    detail: str
    remedy: str = ""


def run(as_json: bool = False) -> int:
    """Look at everything; 0 when plait can work here, 1 when something that it needs is missing."""
    findings = [check() for check in CHECKS]
    if as_json:
        print(to_json("doctor", {"findings": [asdict(f) for f in findings]}))
    else:
        for f in findings:
            print(f"{f.state:4s}  {f.what:12s} {f.detail}")
            if f.remedy:
                print(f"      {'':12s} remedy: {f.remedy}")
        bad = sum(f.state == BAD for f in findings)
        print("plait can work here" if not bad else f"{bad} thing{'s' * (bad > 1)} to mend first")
    return 1 if any(f.state == BAD for f in findings) else 0


def check_python() -> Finding:
    """3.11 or newer."""
    detail = f"{platform.python_version()} at {sys.executable}"
    good = sys.version_info >= (3, 11)
    return Finding("python", OK if good else BAD, detail, "" if good else "install Python 3.11 or 3.12")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_torch() -> Finding:
    """2.11 or newer."""
    found = _version("torch")
    if found is None:
        return Finding("torch", BAD, "not installed", "pip install torch==2.13.0")
    numbers = tuple(int(p) for p in found.split("+")[0].split(".")[:2])
    if numbers < (2, 11):
        return Finding("torch", BAD, found, "pip install torch==2.13.0 (2.11 is the oldest that plait runs on)")
    return Finding("torch", OK, found)


def check_entry_point() -> Finding:
    """torch.compile(backend="plait") finds plait through an entry point of its installed distribution."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    mine = [p.value for p in points if p.name == "plait"]
    if mine:
        return Finding("backend", OK, f'torch.compile(backend="plait") is {mine[0]}')
    return Finding(
        "backend", BAD, 'torch.compile does not know the name "plait"', "pip install --no-deps -e . in the checkout"
    )


def check_compiler() -> Finding:
    """The C++ compiler that CPU kernels need."""
    command = cxx_command()
    path = shutil.which(command[0])
    if path is None:
        return Finding(
            "compiler", BAD, f"{command[0]} is not on the path", "install g++ 11 or newer, or name a compiler in CXX"
        )
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return Finding("compiler", OK, f"{path}: {(done.stdout.splitlines() or ['?'])[0]}")


def check_openmp() -> Finding:
    """Kernels use OpenMP for their threads."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "t.cpp")
        source.write_text(
            '#include <omp.h>\nextern "C" int f() { int n = 0;\n#pragma omp parallel\nn = omp_get_num_threads(); return n; }\n'
        )
        try:
            done = subprocess.run(
                [*cxx_command(), "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(Path(folder, "t.so"))],
                capture_output=True,
                text=True,
            )
        except OSError as error:
            return Finding("OpenMP", BAD, str(error), "install g++ first")
    if done.returncode != 0:
        said = (done.stderr.splitlines() or ["?"])[0]
        return Finding("OpenMP", BAD, said, "install the compiler's OpenMP runtime (libgomp comes with g++)")
    return Finding("OpenMP", OK, ctypes.util.find_library("gomp") or "compiles")


def check_cpu() -> Finding:
    """Vector extensions decide how wide the kernels are."""
    flags: set[str] = set()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            rows = [r for r in f if r.startswith(("flags", "Features"))]
        flags = set(rows[0].partition(":")[2].split()) if rows else set()
    isa = [n for n in ("avx512f", "avx512_bf16", "amx_tile", "avx2", "fma", "asimd", "sve") if n in flags]
    detail = f"{platform.machine()}, {os.cpu_count()} cores, {' '.join(isa) or 'vector extensions unknown'}"
    wide = {"avx2", "avx512f", "asimd"} & flags
    return Finding("cpu", OK if wide else NOTE, detail, "" if wide else "nothing: kernels will be narrow, and slow")


def check_triton() -> Finding:
    """Only GPU kernels need triton."""
    found = _version("triton")
    if found is None:
        return Finding("triton", NOTE, "not installed", "pip install triton==3.6.0, if this machine has an NVIDIA GPU")
    return Finding("triton", OK, found)


def check_gpu() -> Finding:
    """The device and its driver, if there is one."""
    if _version("torch") is None:
        return Finding("gpu", NOTE, "unknown without torch", "install torch first")
    import torch

    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        detail = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, driver {_driver()}"
        return Finding("gpu", OK, detail)
    if torch.version.cuda is None:
        if _driver() != "?":
            return Finding(
                "gpu",
                NOTE,
                "there is a driver, but torch is a CPU build",
                "install a CUDA build of torch to use the GPU",
            )
        return Finding("gpu", NOTE, "none; plait compiles for the CPU")
    return Finding(
        "gpu",
        NOTE,
        f"torch is built for CUDA {torch.version.cuda} but sees no device",
        "check the driver with nvidia-smi",
    )


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "?"
    words = path.read_text().split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "?")


def check_cache() -> Finding:
    """A cache that others could write to is not used."""
    options = Options.make()
    if options.cache_dir == "0":
        return Finding("cache", NOTE, "turned off by the option", "unset PLAIT_CACHE to keep compiled kernels")
    folder = Path(options.cache_dir or Path(cache_home(), "plait"))
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(there, os.W_OK):
        return Finding("cache", NOTE, f"{there} is not writable", "set PLAIT_CACHE to a folder of your own")
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0o700
    if mode & 0o022:
        return Finding("cache", NOTE, f"{folder} is writable by others (mode {mode:o})", f"chmod 700 {folder}")
    free = shutil.disk_usage(there).free / 2**30
    low = free < options.cache_mb / 1024
    detail = f"{folder}, limit {options.cache_mb} MiB, {free:.0f} GiB free on its disk"
    return Finding(
        "cache",
        NOTE if low else OK,
        detail,
        "free some space, or lower the limit, PLAIT_CACHE=folder@MiB" if low else "",
    )


def check_kernel() -> Finding:
    """Compile and run one small program for the machine's best device, strictly, and compare."""
    if _version("torch") is None:
        return Finding("one kernel", BAD, "needs torch", "install torch first")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(65, 130, device=device)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2.0, -1) + 1.0

    try:
        from plait.api import backend

        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = torch.compile(program, backend=backend, options={"strict": True})(x)
        seconds = time.perf_counter() - start
    except Exception as error:  # whatever goes wrong is what the doctor is here to report
        first = next((r for r in str(error).splitlines() if r.strip()), "")
        return Finding(
            "one kernel",
            BAD,
            f"{device}: {type(error).__name__}: {first}"[:300],
            "mend what is marked above, or report this",
        )
    wrong = float((got - program(x)).abs().max())
    if not wrong < 1e-5:
        return Finding(
            "one kernel", BAD, f"{device}: off by {wrong:.3g}", "report this, with the output of plait doctor --json"
        )
    return Finding("one kernel", OK, f"{device}: compiled and ran in {seconds:.2f} s, right to {wrong:.1e}")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_entry_point,
    check_compiler,
    check_openmp,
    check_cpu,
    check_triton,
    check_gpu,
    check_cache,
    check_kernel,
)
