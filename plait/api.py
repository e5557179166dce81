"""The public calls: `backend` for torch.compile, and `compile`. Imports nothing heavy until it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.options import Options


def backend(
    gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile what TorchDynamo captured. Found by torch.compile(backend="plait") through the package's entry point.

    Raises BadOption for an option plait does not have, UnsupportedProgram under strict for what it cannot compile."""
    chosen = Options.make(mode, options)
    from plait.compiler import compile_graph

    return backend_with(compile_graph, chosen, gm, example_inputs)


def backend_with(
    compile_graph: Callable[..., Callable[..., Sequence[Any]]],
    options: Options,
    gm: Any,
    example_inputs: Sequence[Any],
    spec: Any = None,
) -> Callable[..., Any]:
    """The backend around another way to compile one graph: compile_graph(gm, example_inputs, options, kind=kind). `spec`: of the
    device that is planned for, if it is not the tensors'."""
    from plait.frontend.capture import capture, user_line
    from plait.frontend.externs import decompositions
    from plait.frontend.joint import rewrites_for
    from plait.frontend.open_attention import open_attention
    from plait.runtime.guarded import compile_one

    def one(graph: Any, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
        return compile_one(compile_graph, graph, inputs, kind, options, user_line(graph.graph))

    open_attention(gm, options, spec)
    return capture(gm, example_inputs, one, decompositions(), rewrites_for(options))


def reset() -> None:
    """Forget what was compiled in this process: reports, warnings given, open caches. torch._dynamo.reset() calls this."""
    from plait.runtime import report

    report.reset()


def get_compiler_config() -> dict[str, Any]:
    """The settings in effect when nothing is passed: defaults and environment."""
    return Options.make().as_dict()


backend.reset = reset  # type: ignore[attr-defined]
backend.get_compiler_config = get_compiler_config  # type: ignore[attr-defined]


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    numerics: str | None = None,
    dynamic: bool | None = None,
    strict: bool = False,
    fullgraph: bool = False,
    **options: Any,
) -> Any:
    """torch.compile with this backend, and options checked at once. Without `fn`, a decorator.

    `mode`: a level, "O0" to "O3", or its other name: "fast-compile" (O1), "default" (O2), "max" (O3). `numerics`: "fused" or "eager". `strict`: raise where plait would fall back.
    `dynamic`, `fullgraph`: as in torch.compile. Other keywords are the options of `plait.options.Options`."""
    given = dict(options)
    if mode is not None:
        given["mode"] = mode
    if numerics is not None:
        given["numerics"] = numerics
    if strict:
        given["strict"] = True
    Options.make(None, given)
    import torch

    return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph, options=given or None)
