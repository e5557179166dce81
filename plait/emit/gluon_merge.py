"""Two texts for one tile, with and without masks, as one text with branches where they differ.

One loop then serves all tiles: its body is in the instruction cache once, and what a tile leaves for the next one never crosses
from loop to loop, which costs moves.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_NAME = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(r"^ *([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*)(?:: gl\.constexpr)? = ", re.M)


def names_in(text: str) -> set[str]:
    """Identifiers of a text."""
    return set(_NAME.findall(text))


def defined_in(text: str) -> set[str]:
    """Names that the lines of a text assign."""
    return {n for found in _DEFINED.findall(text) for n in found.split(", ")}


def merged(cut: Sequence[str], whole: Sequence[str], test: str) -> list[str] | None:
    """Lines that do what `cut` does where the bool named `test` is true, else what `whole` does; None where a branch would have
    to give what the other does not have."""
    steps = difflib.SequenceMatcher(None, cut, whole, autojunk=False).get_opcodes()
    shared = names_in("\n".join(line for tag, a, b, _, _ in steps if tag == "equal" for line in cut[a:b]))
    out: list[str] = []
    known: list[str] = []  # definitions that only `cut` has: formed again wherever it needs them
    for n, (tag, a, b, c, d) in enumerate(steps):
        if tag == "equal":
            out += cut[a:b]
            continue
        here, there = list(cut[a:b]), list(whole[c:d])
        more, less = defined_in("\n".join(here)), defined_in("\n".join(there))
        later = names_in("\n".join(line for _, _, _, e, f in steps[n + 1 :] for line in whole[e:f]))
        if (more - less) & shared or (less - more) & later:
            return None
        alone = [line for line in here if not defined_in(line) <= less]
        if there or alone != here:
            out += [f"    if {test}:", *_within([*_needed(known, here), *here]), "    else:", *_within(there)]
        known += alone
        if any(name.startswith("acc") for line in alone for name in names_in(line)):
            return None
    return out


def _needed(known: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Those definitions that some lines use, and that these need."""
    wanted, out = names_in("\n".join(lines)), list[str]()
    for line in reversed(known):
        if defined_in(line) & wanted:
            out.insert(0, line)
            wanted |= names_in(line)
    return out


def _within(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines] or ["        pass"]
