"""Compile a captured graph, or say clearly that it runs in eager and why: no failure of ours stops the user's program.

Under `strict` every such failure is raised as UnsupportedProgram instead. An InternalError leaves a repro folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plait.errors import BuildFailed, CompileError, InternalError, PlaitError, UnsupportedProgram, UserError
from plait.frontend.saved import as_traced
from plait.ir.budget import budgeted
from plait.options import Options
from plait.runtime import report
from plait.runtime.locks import Lock
from plait.runtime.progress import following
from plait.runtime.repro import write_repro

Boxed = Callable[[list[Any]], Sequence[Any]]
CompileGraph = Callable[..., Callable[..., Sequence[Any]]]

# Graphs are compiled one at a time in a process: the backward's is compiled from autograd's thread
_compile_lock = Lock()


def compile_one(
    compile_graph: CompileGraph, gm: Any, example_inputs: Sequence[Any], kind: str, options: Options, line: str = ""
) -> Boxed:
    """`compile_graph(gm, example_inputs, options, kind=kind)` in boxed form, or the graph in eager, visibly."""
    with (
        _compile_lock,
        report.compiling(kind) as record,
        budgeted(options.budget, report.spent_seconds()) as budget,
        following(record, line, options.explain),
    ):
        report.trace("plait_graph", lambda: str(gm.print_readable(print_output=False)))
        try:
            compiled = boxed(compile_graph(gm, example_inputs, options, kind=kind))
        except UserError:
            raise
        except Exception as error:  # whatever broke in the compiler, the user's program must still run
            _fall_back(error, gm, example_inputs, kind, options, line)
            record.status = "eager"
            compiled = boxed(as_traced(gm, example_inputs))
        if budget is not None:
            record.left_out = budget.words()
    if options.explain:
        print(record.line())
    return compiled


def _fall_back(
    error: Exception, gm: Any, example_inputs: Sequence[Any], kind: str, options: Options, line: str
) -> None:
    """Count and report; raise under strict."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, PlaitError):
        reason = error.message + (f" ({error.hint})" if error.hint else "")
    artifact = error.artifact if isinstance(error, PlaitError) else None
    where = (error.origin if isinstance(error, PlaitError) else None) or line
    if isinstance(error, InternalError) or not isinstance(error, CompileError):
        # our own bug: leave everything that is needed to see it again
        artifact = artifact or write_repro(gm, example_inputs, kind, options, error)
        reason = f"plait broke ({type(error).__name__}): {reason}"
    if options.strict:
        hint = None if isinstance(error, BuildFailed) else "without strict it runs in eager"
        raise UnsupportedProgram(reason, origin=where or None, hint=hint, artifact=artifact) from error
    report.add_fallback(
        report.Fallback(reason, "graph", "", where, report.current().name, artifact or ""),
    )


def boxed(fn: Callable[..., Any]) -> Boxed:
    """In AOT autograd's boxed convention: one list of arguments, emptied by the callee so that they can die early."""
    if getattr(fn, "_boxed_call", False):
        return fn
    run = getattr(fn, "run", None)
    if getattr(run, "_boxed_call", False):
        assert run is not None
        return run  # type: ignore[no-any-return]

    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return fn(*taken)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
