"""The work of `plait verify` and `plait bisect`: load a program file, judge what it makes, print or write what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.runtime.progress import showing
from plait.tools.explain import load, say_to_people, silent
from plait.tools.files import can_write, write_file


def run(
    file: str, *, train: bool, seeds: int, json_path: str | None, options: Mapping[str, Any], debug: bool = False
) -> int:
    """Verify a file; 0 when it is right, 1 when it is wrong."""

    def judge(fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Any:
        from plait.diagnose.verify import verify_calls

        return verify_calls(
            fn,
            calls,
            train=train or None,
            seeds=seeds,
            options=dict(options) or None,
            name=Path(file).name,
            say=say_to_people,
        )

    return 0 if _judged(file, json_path, debug, judge).right else 1


def run_bisect(
    file: str,
    *,
    slow: bool,
    train: bool,
    seeds: int,
    folder: str | None,
    json_path: str | None,
    options: Mapping[str, Any],
    debug: bool = False,
) -> int:
    """Bisect a file; 0 when there is nothing to find, 1 when there is."""

    def judge(fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Any:
        from plait.diagnose.bisect import bisect_calls

        return bisect_calls(
            fn,
            calls,
            slow=slow,
            train=train or None,
            seeds=seeds,
            options=dict(options) or None,
            folder=folder,
            name=Path(file).name,
            say=say_to_people,
        )

    return 1 if _judged(file, json_path, debug, judge).fault else 0


def _judged(
    file: str,
    json_path: str | None,
    debug: bool,
    judge: Callable[[Callable[..., Any], list[tuple[Any, ...]]], Any],
) -> Any:
    """What `judge` finds of a file's program, written and printed."""
    can_write(json_path)
    say_to_people(f"loading {file} ...")
    with silent(debug), showing():
        found = judge(*load(file))
    if json_path == "-":
        print(found.to_json())
        return found
    if json_path is not None:
        write_file(json_path, found.to_json() + "\n")
    print(found, end="")
    return found
