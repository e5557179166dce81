"""Every exception plait raises, in one place; refusals to fuse are Reasons (plan/legality), not exceptions.

`UserError`: the program or the options are at fault, the message says what to change.
`CompileError`: a valid program that plait could not compile; falls back to eager unless `strict`.
`InternalError`: an invariant of plait broke. `RuntimeFault`: trouble while running a compiled program.
"""

from __future__ import annotations


class PlaitError(Exception):
    """Base of all. `origin` is the user's source line, `hint` the next thing to try, `artifact` a path to look at."""

    def __init__(
        self, message: str, *, origin: str | None = None, hint: str | None = None, artifact: str | None = None
    ) -> None:
        self.message, self.origin, self.hint, self.artifact = message, origin, hint, artifact
        parts = [message]
        if origin:
            parts.append(f"  at {origin}")
        if hint:
            parts.append(f"  hint: {hint}")
        if artifact:
            parts.append(f"  see {artifact}")
        super().__init__("\n".join(parts))


class UserError(PlaitError):
    """The program or its options are at fault."""


class BadOption(UserError):
    """An option that does not exist, or a value it cannot take."""


class TextError(UserError):
    """A text of one of plait's levels that cannot be read, or says what cannot be: `line` of it, and `why`."""

    def __init__(self, level: str, line: int, why: str, text: str = "") -> None:
        self.level, self.line, self.why = level, line, why
        super().__init__(f"{level} text, line {line}: {why}", origin=text or None)


class OverrideFailed(UserError):
    """A file that should replace a stage of the compilation, and cannot: the message begins with its path and line."""


class FusionRefused(UserError):
    """Operators that the user wants in one kernel, and the law that forbids it."""


class UnsupportedProgram(UserError):
    """Raised under `strict=True` for anything that would have run in eager."""


class CompileError(PlaitError):
    """A valid program that plait could not compile."""


class ImportFailed(CompileError):
    """An FX graph that cannot be expressed as a Graph."""


class PlanFailed(CompileError):
    """No plan could be made."""


class LowerFailed(CompileError):
    """A group that no tile program fits."""


class BuildFailed(CompileError):
    """The C++ or Triton compiler refused a kernel; `artifact` is the repro folder."""


class InternalError(PlaitError):
    """An invariant of plait broke; please report it with the repro folder."""


class CheckFailed(InternalError):
    """A level's checker found a broken invariant. `invariant` is its number, such as "N1"."""

    def __init__(self, level: str, invariant: str, sentence: str, window: str = "") -> None:
        self.level, self.invariant, self.window = level, invariant, window
        super().__init__(f"{level}: {invariant}: {sentence}" + (f"\n{window}" if window else ""))


class RewriteDiverged(InternalError):
    """A rewrite did not reach its fixpoint within its budget."""


class TableIncomplete(InternalError):
    """A per-operator table lacks an entry."""


class RuntimeFault(PlaitError):
    """Trouble while running a compiled program."""


class LaunchFailed(RuntimeFault):
    """A kernel could not be launched."""


class Mismatch(RuntimeFault):
    """A result differs from its reference by more than the verdict rule allows."""


class CacheCorrupt(RuntimeFault):
    """A cache entry that failed verification (never raised out of the cache: it becomes a miss)."""
