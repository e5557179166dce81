"""Results that may lie where an operand did: what a program reads once, at the very places that it writes.

    v = b3[p0 * 128256 + p1]; ...; b6[p0 * 128256 + p1] = w        b6 may be b3's memory, if nobody reads b3 any more

Point by point only. A block that also reduces what it reads may keep a value in several lanes, and some of these could load
it after another has stored.
"""

from __future__ import annotations

from plait.tile.program import Load, Reduce, Scan, Store, Sweep, TileProgram


def overwritable(program: TileProgram) -> list[tuple[int, int]]:
    """(written, read) buffers that may be the same memory."""
    stmts = list(program.walk())
    if any(isinstance(s, (Reduce, Scan, Sweep)) for s in stmts):
        return []
    loads, stores = [s for s in stmts if isinstance(s, Load)], [s for s in stmts if isinstance(s, Store)]
    return [(t.buffer, s.buffer) for t in stores for s in loads if _replaces(program, t, s, loads, stores)]


def _replaces(p: TileProgram, t: Store, s: Load, loads: list[Load], stores: list[Store]) -> bool:
    written, read = p.buffers[t.buffer], p.buffers[s.buffer]
    alone = sum(x.buffer == s.buffer for x in loads) == sum(x.buffer == t.buffer for x in stores) == 1
    alike = (written.dtype, written.elems, written.rows) == (read.dtype, read.elems, read.rows)
    roles = written.role == "out" and read.role == "in"
    # under a guard one block would store while others still read
    return alone and alike and roles and t.address == s.address and t.span == s.span and not t.guard
