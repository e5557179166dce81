"""Element types, free of torch. Storage-only types (f16, bf16, f8*) never do arithmetic: it happens in f32 between casts."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type. `.value` is its name in printed IR."""

    b1 = "bool"
    u8 = "u8"
    i8 = "i8"
    i16 = "i16"
    i32 = "i32"
    i64 = "i64"
    f16 = "f16"
    bf16 = "bf16"
    f32 = "f32"
    f64 = "f64"
    f8e4m3 = "f8e4m3"
    f8e5m2 = "f8e5m2"
    other = "other"  # what plait only passes between externs (complex, quantised, …); their `outs` name the torch type

    def __repr__(self) -> str:
        return self.value

    @property
    def nbytes(self) -> int:
        """Bytes an element takes in memory."""
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        """Any floating-point type."""
        return self.value[0] in "fb" and self is not DType.b1

    @property
    def is_int(self) -> bool:
        """A signed or unsigned integer (bool is not)."""
        return self.value[0] in "iu"

    @property
    def is_storage_only(self) -> bool:
        """Types that are only loaded, stored, moved and cast."""
        return self in _STORAGE_ONLY

    @property
    def compute(self) -> DType:
        """The type arithmetic on values of this type happens in."""
        return DType.f32 if self in _STORAGE_ONLY and self is not DType.other else self


_BYTES = {
    DType.b1: 1,
    DType.u8: 1,
    DType.i8: 1,
    DType.i16: 2,
    DType.i32: 4,
    DType.i64: 8,
    DType.f16: 2,
    DType.bf16: 2,
    DType.f32: 4,
    DType.f64: 8,
    DType.f8e4m3: 1,
    DType.f8e5m2: 1,
    DType.other: 8,  # for cost estimates alone
}
_STORAGE_ONLY = frozenset({DType.f16, DType.bf16, DType.f8e4m3, DType.f8e5m2, DType.other})
