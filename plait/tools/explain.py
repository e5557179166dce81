"""The work of `plait explain`: load a program file, explain what it makes, and print or write the report.

The file defines make(), which returns (fn, args): the arguments of one call, or a list of tuples, each the arguments of one.
Whatever is wrong with the file or the program is one clear line and exit code 2.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import UserError
from plait.report.text import WIDTH
from plait.runtime.progress import showing
from plait.tools.files import can_write, write_file

if TYPE_CHECKING:
    from plait.tools.reproduce import Wanted

_NARROWEST = 60
_PROGRAM = "plait_explained_program"


def run(
    file: str,
    *,
    train: bool,
    target: str | None,
    json_path: str | None,
    html_path: str | None = None,
    top: int,
    detail: bool | None,
    options: Mapping[str, Any],
    debug: bool = False,
    wanted: Wanted | None = None,
) -> int:
    """Explain a file; the exit code. With `wanted`, reproducers are written."""
    can_write(json_path)
    can_write(html_path)
    if wanted is not None:
        wanted.check()
    say_to_people(f"loading {file} ...")
    with silent(debug), showing():  # what runs in eager is in the report
        fn, calls = load(file)
        from plait.report.run import explain_calls

        given = dict(options) or None
        report = explain_calls(
            fn, calls, train=train, target=target, options=given, name=Path(file).name, say=say_to_people
        )
        written = [] if wanted is None else wanted.write(report)
    if html_path is not None:
        write_file(html_path, report.to_html())
    if json_path == "-":
        print(report.to_json())
        print("".join(f"{line}\n" for line in written), end="", file=sys.stderr)
        return 0
    if json_path is not None:
        write_file(json_path, report.to_json() + "\n")
    color = sys.stdout.isatty()
    width = min(WIDTH, max(shutil.get_terminal_size().columns, _NARROWEST)) if color else WIDTH
    print(report.text(top=top, detail=detail, width=width, color=color), end="")
    print("".join(f"{line}\n" for line in written), end="")
    return 0


def say_to_people(line: str) -> None:
    """Progress, on a terminal's error stream: results are for the other one."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def silent(debug: bool) -> Iterator[None]:
    """Without what the program prints and torch warns of, which are no part of the answer, and unless `debug` without torch's
    own tracebacks of a program that raises: the error says what is wrong."""
    if not debug:
        logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def load(file: str) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """fn and its calls, of a program file. Raises UserError in one line."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no file {file}", hint="name a Python file with a make() that returns (fn, args)")
    spec = importlib.util.spec_from_file_location(_PROGRAM, path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"{file} is not a Python file: its name does not end in .py", hint=f"rename it to {path.stem}.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PROGRAM] = module  # dataclasses and the like look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does
        raise UserError(
            f"{file} cannot be loaded: {_said(error, file)}", hint=f"first make `python {file}` run"
        ) from error
    make = getattr(module, "make", None)
    if not callable(make):
        raise UserError(f"{file} defines no make()", hint="def make(): return fn, [args, ...]")
    try:
        made = make()
    except (Exception, SystemExit) as error:  # whatever the file does
        hint = "make() must run on its own first; --debug shows the traceback"
        raise UserError(f"make() of {file} raises {_said(error, file)}", hint=hint) from error
    if (
        not isinstance(made, tuple | list)
        or len(made) != 2
        or not callable(made[0])
        or not isinstance(made[1], tuple | list)
    ):
        raise UserError(f"make() of {file} does not return (fn, args)", hint="def make(): return fn, [args, ...]")
    fn, args = made
    if args and isinstance(args, list) and all(isinstance(a, tuple) for a in args):
        return fn, args  # several calls
    return fn, [tuple(args)]


def _said(error: BaseException, file: str) -> str:
    """The error in one line, with the file's line where it came from."""
    here = Path(file).resolve()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == here]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    words = str(error).strip().splitlines()
    where = f" (line {line})" if line else ""
    return f"{type(error).__name__}{': ' + words[0] if words else ''}{where}"
