"""The work of `plait verify --self-test`: print what came of each known fault as it comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from plait.tools.explain import say_to_people, silent
from plait.tools.files import can_write, write_file


def run(*, json_path: str | None, options: Mapping[str, Any], debug: bool = False) -> int:
    """0 when every fault was caught, else 1."""
    can_write(json_path)
    shown = json_path != "-"
    if shown:
        print("known faults, planted one at a time in programs that are right without them", flush=True)
    else:
        say_to_people("planting known faults ...")
    from plait.diagnose.selftest import HEAD, Tried, devices, self_test

    out, on = sys.stdout, devices()

    def show(row: Tried | str) -> None:
        if shown:
            print(row, file=out, flush=True)

    show(HEAD)
    with silent(debug):
        found = self_test(on=on, options=dict(options), say=say_to_people, show=show)
    if json_path == "-":
        print(found.to_json())
    elif json_path is not None:
        write_file(json_path, found.to_json() + "\n")
    if shown:  # the verdict is the last line
        print(f"on {' and '.join(on)}, {found.seconds:.0f} s")
        print(found.total())
    return 0 if found.right else 1
