"""Everything that the compiler makes of a program, as texts: to be made again elsewhere, and to be the same there to the byte.

`python determinism.py PROGRAMS.py NAME...` writes {"program graph device level": text} as JSON: graph, plan, tile program, script,
sources, cache keys, for the CPU and for a card that need not be here.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from plait.api import backend_with
from plait.compiler import Compiled, all_levels, imported
from plait.emit import cpp
from plait.emit.cpp import CppKernel
from plait.emit.gluon import emit_gluon
from plait.emit.triton import emit_triton
from plait.errors import LowerFailed
from plait.ir.graph import Node
from plait.options import Options
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime.build import CppSources, cpp_key, same_kernels
from plait.runtime.dump import texts
from plait.runtime.link import Launch, link
from plait.tile.alternatives import alternatives

DEVICES = ("cpu", "h200")


@contextlib.contextmanager
def other_order(seed: int) -> Iterator[None]:
    """Inside, sets of nodes have another order, as they have in a process with other addresses."""
    with_hash: Any = Node
    before = with_hash.__hash__
    with_hash.__hash__ = lambda n: hash((seed, n.serial))
    try:
        yield
    finally:
        with_hash.__hash__ = before


def levels_of(
    made: tuple[Callable[..., Any], list[Any], bool], options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Every level of every graph of a program, for every device. What runs is the program as it is."""
    fn, args, train = made
    found: dict[str, str] = {}
    chosen = Options.make(None, options)
    count = 0

    def one(gm: Any, inputs: Sequence[Any], options: Options, *, kind: str) -> Callable[..., Any]:
        nonlocal count
        for device in DEVICES:
            compiled = all_levels(imported(gm, inputs, options, kind), SPECS[device], options)
            for level, text in _texts(compiled, options).items():
                found[f"graph {count} ({kind}) {device} {level}"] = text
        count += 1
        forward: Callable[..., Any] = gm.forward
        return forward

    torch._dynamo.reset()
    run = torch.compile(fn, backend=lambda gm, inputs: backend_with(one, chosen, gm, inputs))
    out = run(*args)
    if train:
        out.sum().backward()
    assert count, "nothing was compiled"
    return found


def _texts(compiled: Compiled, options: Options) -> dict[str, str]:
    launches = [launch for launch in compiled.launches if launch.parts]
    on_cpu = compiled.spec.kind == "cpu"
    sources, keys = _of_cpu(launches) if on_cpu else _of_card(launches)
    script = link(
        compiled.graph, compiled.plan.reading, compiled.launches, Layouts(compiled.graph), overwrite=not on_cpu
    )
    out = texts(compiled, sources)
    return out | {"script": str(script), "keys": "\n".join([options.codegen_key(), *keys])}


def _of_cpu(launches: Sequence[Launch]) -> tuple[dict[str, str], list[str]]:
    made = CppSources([CppKernel(x.name, tuple(p.program for p in x.parts)) for x in launches])
    whole = made.unit(made.distinct())
    keys = [cpp_key(whole.text, cpp.compile_flags()), str(made.same_as)] if launches else []
    return {name: made.text(k) for k, name in enumerate(made.names)}, keys


def _of_card(launches: Sequence[Launch]) -> tuple[dict[str, str], list[str]]:
    """Of each launch the kernel, the schedules that would be timed beside it, and its form for Hopper where there is one."""
    sources = [emit_triton([p.program for p in x.parts], x.name) for x in launches]
    keys = [f"{s.name} {s.num_warps} {s.num_stages} {s.args}" for s in sources]
    out = {s.name: s.text for s in sources}
    for x in launches:
        first = x.parts[0].program
        keys += [f"{x.name}: {schedule}" for schedule in alternatives(first)]
        if len(x.parts) == 1:
            with contextlib.suppress(LowerFailed):
                out[f"{x.name}_h"] = emit_gluon(first, f"{x.name}_h").text
    return out, [*keys, str(same_kernels(sources))]


def difference(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """The first text that differs, as a diff; nothing where all are the same."""
    if list(a) != list(b):
        return f"texts of {sorted(set(a) ^ set(b))}, or in another order"
    for name in a:
        if a[name] != b[name]:
            lines = difflib.unified_diff(a[name].splitlines(), b[name].splitlines(), name, name, n=1, lineterm="")
            return "\n".join(list(lines)[:40])
    return ""


def main(path: str, names: Sequence[str]) -> int:
    """Print the texts of these programs of a file."""
    spec = importlib.util.spec_from_file_location("programs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = {f"{n} {k}": text for n in names for k, text in levels_of(module.PROGRAMS[n]()).items()}
    json.dump(dict(sorted(out.items())), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
