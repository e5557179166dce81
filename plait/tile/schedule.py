"""Schedule: how a group's dims are cut, as one line of text that is stored, quoted and pinned.

form=flat tile=p0:4,r0:all warps=8 stages=1 vector=r0
"""

from __future__ import annotations

from dataclasses import dataclass, replace

EVERY = 1 << 30  # of `blocks`: one for each tile


@dataclass(frozen=True, slots=True)
class Schedule:
    """`form`: "flat" or "swept" (see tile/program). `tile`: points of each dim a block takes (0: all of it; dims not named
    take 1). `warps`, `stages`: Triton launch options. `vector`: the dim whose neighbouring points share a CPU vector or a
    GPU's coalesced access; "" when there is none. `blocks`: of a persistent kernel, whose blocks walk the tiles and read
    factors of products through tensor descriptors; 0: every tile has a block of its own."""

    form: str = "flat"
    tile: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 1
    vector: str = ""
    blocks: int = 0

    def size(self, dim: str) -> int:
        """Tile points of a dim: 0 means all, 1 when not named."""
        return dict(self.tile).get(dim, 1)

    def __str__(self) -> str:
        tiles = ",".join(f"{d}:{n or 'all'}" for d, n in self.tile)
        blocks = f" blocks={'all' if self.blocks == EVERY else self.blocks}" if self.blocks else ""
        return f"form={self.form} tile={tiles} warps={self.warps} stages={self.stages} vector={self.vector}{blocks}"

    def having(self, **changes: object) -> Schedule:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def parse_schedule(text: str) -> Schedule:
    """Inverse of str(). Raises ValueError on a line it cannot read."""
    fields: dict[str, str] = {}
    for part in text.split():
        key, eq, val = part.partition("=")
        if not eq or key not in ("form", "tile", "warps", "stages", "vector", "blocks"):
            raise ValueError(f"not a schedule field: {part!r} in {text!r}")
        fields[key] = val
    tile: list[tuple[str, int]] = []
    for item in filter(None, fields.get("tile", "").split(",")):
        dim, colon, n = item.partition(":")
        if not colon:
            raise ValueError(f"not a tile: {item!r} in {text!r}")
        tile.append((dim, 0 if n == "all" else int(n)))
    return Schedule(
        form=fields.get("form", "flat"),
        tile=tuple(tile),
        warps=int(fields.get("warps", "4")),
        stages=int(fields.get("stages", "1")),
        vector=fields.get("vector", ""),
        blocks=EVERY if fields.get("blocks") == "all" else int(fields.get("blocks", "0")),
    )


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
