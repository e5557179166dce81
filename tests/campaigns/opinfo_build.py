"""The operator database through the whole compiler: every sample is traced, planned, built by g++, run and judged.

`python -m tests.campaigns.opinfo_build [--dtype float32] [--train] [--only NAME] [--every N] [--jobs N]` prints what is wrong and
how many operators run through a plait kernel on every sample. All samples of an operator are built as one library.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from plait.compiler import Compiled, plan_and_lower, simplify
from plait.emit.cpp import CppKernel
from plait.errors import BuildFailed
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.plan.device import spec_for
from plait.plan.layout import Layouts
from plait.runtime.build import CppSources, build_cpp
from plait.runtime.cache import cache_for
from plait.runtime.executable import Executable
from plait.runtime.link import link

RANDOM = (
    "rand",
    "dropout",
    "bernoulli",
    "normal",
    "uniform",
    "multinomial",
    "exponential",
    "cauchy",
    "geometric",
    "empty",
)
OPTIONS = Options.make(None, {"cache_dir": "0"})


@dataclass
class Outcome:
    """What became of one operator: samples in all, those with a plait kernel, and complaints."""

    name: str
    samples: int = 0
    native: int = 0
    wrong: list[str] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)

    @property
    def is_native(self) -> bool:
        """Every sample ran through at least one kernel, rightly."""
        return self.samples > 0 and self.native == self.samples and not self.wrong and not self.broke

    def line(self) -> str:
        """One line for people and for the parent process."""
        state = "native" if self.is_native else "aten" if not self.native else "part"
        bad = "".join(f"\n    WRONG {w}" for w in self.wrong[:4]) + "".join(f"\n    BROKE {b}" for b in self.broke[:4])
        return f"{self.name}: {state} {self.native}/{self.samples}{bad}"


@dataclass
class _Case:
    fn: Callable[..., Any]
    tensors: list[torch.Tensor]
    gm: Any
    compiled: Compiled


def run_entry(op: Any, dtype: torch.dtype, *, train: bool = False, limit: int = 40) -> Outcome:
    """All samples of one operator."""
    out = Outcome(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))
    cases: list[_Case] = []
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=train))[:limit]:
        try:
            fn, tensors = _flattened(op, sample, train)
            torch.manual_seed(0)
            fn(*tensors)
        except Exception:  # eager itself refuses the sample (no gradient, say): nothing to compare with
            continue
        out.samples += 1
        try:
            gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*tensors)
            graph = simplify(import_fx(gm, tensors), spec_for("cpu"), OPTIONS)
            cases.append(_Case(fn, tensors, gm, plan_and_lower(graph, spec_for("cpu"), OPTIONS)))
        except Exception as error:
            out.broke.append(f"{type(error).__name__}: {str(error)[:300]}")
    _build_and_judge(out, cases)
    return out


def _flattened(op: Any, sample: Any, train: bool) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The call as a function of its tensors; under `train` with the gradients of all float inputs."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    tensors = [leaves[i].detach() for i in places]

    def call(*given: torch.Tensor) -> Any:
        mine = list(leaves)
        for i, t in zip(places, given, strict=True):
            mine[i] = t
        x, args, kwargs = pytree.tree_unflatten(mine, spec)
        return op.get_op()(x, *args, **kwargs)

    if not train:
        return call, tensors

    def joint(*given: torch.Tensor) -> Any:
        wanted = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        outs = [o for o in pytree.tree_leaves(call(*wanted)) if isinstance(o, torch.Tensor) and o.requires_grad]
        weights = [torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].view(o.shape) for o in outs]
        leafs = [w for w in wanted if w.requires_grad]
        return outs, torch.autograd.grad(outs, leafs, weights, allow_unused=True)

    return joint, tensors


def _build_and_judge(out: Outcome, cases: Sequence[_Case]) -> None:
    launches = [launch for c in cases for launch in c.compiled.launches if launch.parts]
    kernels = [CppKernel(f"k{i}", tuple(p.program for p in launch.parts)) for i, launch in enumerate(launches)]
    try:
        built = build_cpp(CppSources(kernels), cache_for(OPTIONS)) if kernels else []
    except Exception as error:
        out.broke.append(f"emit: {type(error).__name__}: {str(error)[:300]}")
        return
    at = 0
    for c in cases:
        count = sum(1 for launch in c.compiled.launches if launch.parts)
        mine = built[at : at + count]
        at += count
        failed = next((b for b in mine if isinstance(b, BuildFailed)), None)
        if failed is not None:
            out.broke.append(f"build: {failed.message[:300]}")
            continue
        out.native += count > 0
        try:
            _judge(out, c, mine)
        except Exception as error:
            out.broke.append(f"run: {type(error).__name__}: {str(error)[:300]}")


def _judge(out: Outcome, c: _Case, built: Sequence[Any]) -> None:
    graph = c.compiled.graph
    script = link(graph, c.compiled.plan.reading, c.compiled.launches, Layouts(graph))
    constants = [_attribute(c.gm, name) for _, name in sorted(graph.constants.items())]
    run = Executable(script, built, constants, lambda name: _attribute(c.gm, name))
    got = run(*[t.clone() for t in c.tensors])
    eager = pytree.tree_leaves(c.fn(*[t.clone() for t in c.tensors]))
    if any(r in out.name for r in RANDOM):
        return
    exact = pytree.tree_leaves(reference(c.fn, c.tensors))
    for k, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        if not isinstance(e, torch.Tensor):
            continue
        verdict = compare(g, e, x)
        if verdict.status == FAIL:
            shapes = [tuple(t.shape) for t in c.tensors]
            out.wrong.append(f"out {k} of {shapes}: {verdict.message[:250]}")


def _attribute(gm: Any, name: str) -> Any:
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm


def entries(only: str = "", every: int = 1, part: tuple[int, int] = (0, 1)) -> list[Any]:
    """Operators of the database, thinned out."""
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for i, op in enumerate(op_db) if i % every == 0 and only in op.name]
    return chosen[part[0] :: part[1]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit 1 when anything is wrong or broke."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--train", action="store_true")
    p.add_argument("--only", default="")
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--limit", type=int, default=40)
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    a = p.parse_args(arguments)
    if a.jobs > 1:
        flags = ["--dtype", a.dtype, "--only", a.only, "--every", str(a.every), "--limit", str(a.limit)]
        flags += ["--train"] if a.train else []
        command = [sys.executable, "-m", "tests.campaigns.opinfo_build", *flags, "--part"]
        children = [subprocess.Popen([*command, f"{k}/{a.jobs}"]) for k in range(a.jobs)]
        return max(child.wait() for child in children)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    nth, of = (int(x) for x in a.part.split("/"))
    dtype, bad, native, total = getattr(torch, a.dtype), 0, 0, 0
    for op in entries(a.only, a.every, (nth, of)):
        if dtype not in op.dtypes or (a.train and not op.supports_autograd):
            continue
        done = run_entry(op, dtype, train=a.train, limit=a.limit)
        total += 1
        native += done.is_native
        bad += bool(done.wrong or done.broke)
        print(done.line(), flush=True)
    print(f"part {nth}/{of}: {native} of {total} operators native on every sample, {bad} with complaints", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
