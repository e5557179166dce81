"""What all commands of `plait` have in common: exit codes, and errors of one or two lines, without a traceback unless --debug.

error: what is wrong and why, at the user's line
  hint: what to do next
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from plait.errors import InternalError, PlaitError, UserError

FINE, WRONG, FAULT, BROKEN, STOPPED = 0, 1, 2, 3, 130
EXIT_CODES: dict[int, str] = {
    FINE: "fine",
    WRONG: "it ran, and something is wrong: a result, a workload, the machine, the cache, a compilation",
    FAULT: "the command line, a file that it names, or the program in it is at fault",
    BROKEN: "plait itself broke: please report it",
    STOPPED: "stopped by Ctrl-C; what was found so far is kept where the command says so",
}
"""The documentation's table is made from this."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_DEBUG = "plait.debug"
_TRACE = "--debug shows the traceback"


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_DEBUG] = ctx.meta.get(_DEBUG, False) or value
    return value


def debug_option(expose: bool = False) -> Callable[[F], F]:
    """The flag --debug of a command; `expose`: the command wants to know as well."""
    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=expose,
        callback=_note_debug,
        help="Show the traceback of an error.",
    )


class Commands(click.Group):
    """Turns every error into a short message and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parse = super().parse_args
        return _answered(ctx, lambda: parse(ctx, args))

    def invoke(self, ctx: click.Context) -> Any:
        invoke = super().invoke
        return _answered(ctx, lambda: invoke(ctx))


def _answered(ctx: click.Context, call: Callable[[], T]) -> T:
    try:
        return call()
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):  # click ends quietly when nobody reads on
        raise
    except (KeyboardInterrupt, EOFError):
        click.echo("stopped", err=True)
        ctx.exit(STOPPED)
    except Exception as error:  # whatever it is, it is answered
        if _is_plain_help(error) or ctx.meta.get(_DEBUG):
            raise
        lines, code = answer(error)
        click.echo("\n".join(lines), err=True)
        ctx.exit(code)


def _is_plain_help(error: Exception) -> bool:
    """Click's way to show the help of a command that was given nothing."""
    return type(error).__name__ == "NoArgsIsHelpError"


def answer(error: Exception) -> tuple[list[str], int]:
    """The lines that say what is wrong and what to do about it, and the exit code."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "plait"
        return _lines(_flat(error.format_message()), f"{path} --help"), FAULT
    if isinstance(error, click.ClickException):
        return _lines(_flat(error.format_message()), _TRACE), FAULT
    if isinstance(error, PlaitError):
        text = _flat(error.message) if not isinstance(error, InternalError) else error.message.partition("\n")[0]
        text += f", at {' and '.join(_rows(error.origin))}" if error.origin else ""
        hint = _flat(error.hint) if error.hint else _TRACE
        hint += f"; see {error.artifact}" if error.artifact else ""
        code = FAULT if isinstance(error, UserError) else BROKEN if isinstance(error, InternalError) else WRONG
        return _lines(text, hint), code
    words = _flat(str(error))[:300]
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = f"plait broke: {type(error).__name__}{': ' + words if words else ''}{where}"
    return _lines(text, f"please report this; {_TRACE}"), BROKEN


def _lines(text: str, hint: str) -> list[str]:
    return [f"error: {text}", f"  hint: {hint}"]


def _rows(text: str) -> list[str]:
    return [row.strip() for row in text.splitlines() if row.strip()]


def _flat(text: str) -> str:
    return " ".join(_rows(text))
