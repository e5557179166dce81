"""The work of `plait verify` and `plait bisect`: load a program file, judge what it makes, print or write what was found."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.tools.explain import can_write, load, quiet, say_to_people, writing


def run(
    file: str, *, train: bool, seeds: int, json_path: str | None, options: Mapping[str, Any], debug: bool = False
) -> int:
    """Verify a file; 0 when it is right, 1 when it is wrong."""
    can_write(json_path)
    say_to_people(f"loading {file} ...")
    with silent(debug):
        fn, calls = load(file)
        from plait.diagnose.verify import verify_calls

        found = verify_calls(
            fn,
            calls,
            train=train or None,
            seeds=seeds,
            options=dict(options) or None,
            name=Path(file).name,
            say=say_to_people,
        )
    if json_path is not None:
        write(json_path, found.to_json())
    if json_path != "-":
        print(found, end="")
    return 0 if found.right else 1


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
    can_write(json_path)
    say_to_people(f"loading {file} ...")
    with silent(debug):
        fn, calls = load(file)
        from plait.diagnose.bisect import bisect_calls

        found = bisect_calls(
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
    if json_path is not None:
        write(json_path, found.to_json())
    if json_path != "-":
        print(found, end="")
    return 1 if found.fault else 0


@contextlib.contextmanager
def silent(debug: bool) -> Iterator[None]:
    """Without what the program prints and torch warns of: neither is part of the answer."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), quiet(not debug):
        warnings.simplefilter("ignore")
        yield


def write(path: str, text: str) -> None:
    """To a file, or for "-" to the output."""
    if path == "-":
        print(text)
        return
    with writing(path):
        Path(path).write_text(text + "\n", encoding="utf-8")
