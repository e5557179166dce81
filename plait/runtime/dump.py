"""Every level of a compiled graph as text: for PLAIT_DUMP's files, for structured traces, and for tools.

Files are numbered by stage and named by graph, so that two runs can be compared with diff:
graph0.1.graph.txt  graph0.2.plan.txt  graph0.3.tile.txt  graph0.4.source.cpp (.py for Triton)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from plait.ir.text import print_graph
from plait.options import Options
from plait.runtime import report
from plait.runtime.override import file_name, kernel_mark
from plait.tile.text import print_program


def texts(compiled: Any, sources: Mapping[str, str]) -> dict[str, str]:
    """Stage → text, of a compiler.Compiled and its kernels' sources."""
    programs = [part.program for launch in compiled.launches for part in launch.parts]
    return {
        "graph": print_graph(compiled.graph),
        "plan": str(compiled.plan),
        "tile": "\n".join(print_program(p) for p in programs),
        "source": "\n\n".join(f"{kernel_mark(name, suffix_of(sources))}\n{text}" for name, text in sources.items()),
    }


def suffix_of(sources: Mapping[str, str]) -> str:
    """Of the file that kernels are written into."""
    return "py" if any("@triton.jit" in s or "@gluon.jit" in s for s in sources.values()) else "cpp"


def record_levels(compiled: Any, sources: dict[str, str], options: Options) -> None:
    """Keep the sources with the record, offer plan and kernels to whoever traces, and write the files asked for."""
    record = report.current()
    record.details["sources"] = sources
    report.trace("plait_plan", lambda: str(compiled.plan))
    report.trace("plait_kernels", lambda: "\n\n".join(sources.values()))
    if not options.dump:
        return
    written = texts(compiled, sources)
    try:
        os.makedirs(options.dump_dir, exist_ok=True)
        for stage in options.dump:
            name = file_name(record.name, stage, suffix_of(sources))
            with open(os.path.join(options.dump_dir, name), "w", encoding="utf-8") as out:
                out.write(written[stage])
    except OSError as error:
        report.warn_once(f"plait cannot write the dump: {error}")
