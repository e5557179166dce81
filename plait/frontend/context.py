"""What an operator's lowering works with: lazy views, the node-making Context, and the registry of lowerings.

A lowering gets the operator's arguments as the FX graph has them, with tensors as `Tensor`, SymInts as `Expr`, and
SymFloats as 0-dim f64 `Tensor`s; it returns a Tensor, a tuple of Tensors, or NotImplemented, which sends the operator
to its ATen call (`ctx.reason` says why). Views are never nodes: a Tensor is a node seen through an index map, and
every function here composes those maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Node, Read, Scalar, Shape, compose, identity
from plait.ir.index import Expr, Facts

_TO_DTYPE = {
    torch.bool: DType.b1,
    torch.uint8: DType.u8,
    torch.int8: DType.i8,
    torch.int16: DType.i16,
    torch.int32: DType.i32,
    torch.int64: DType.i64,
    torch.float16: DType.f16,
    torch.bfloat16: DType.bf16,
    torch.float32: DType.f32,
    torch.float64: DType.f64,
    torch.float8_e4m3fn: DType.f8e4m3,
    torch.float8_e5m2: DType.f8e5m2,
}
_FROM_DTYPE = {d: t for t, d in _TO_DTYPE.items()}
_INT_BITS = {DType.u8: 8, DType.i8: 8, DType.i16: 16, DType.i32: 32, DType.i64: 64}


def to_dtype(dtype: torch.dtype) -> DType | None:
    """plait's element type, or None for what plait only passes through (complex, quantised, wide unsigned)."""
    return _TO_DTYPE.get(dtype)


def from_dtype(dtype: DType) -> torch.dtype:
    """torch's element type; KeyError for DType.other, whose torch type only the extern that made it knows."""
    return _FROM_DTYPE[dtype]


@dataclass(frozen=True)
class Tensor:
    """A lazy view of a node's value: at a point of `shape` it is source[index], or `fill` where a guard is negative."""

    source: Node
    shape: Shape
    index: Shape
    guard: Shape = ()
    fill: Scalar = 0
    strides: Shape | None = field(default=None, compare=False)  # eager's, where the FX graph tells them
    is_number: bool = field(default=False, compare=False)  # stands for a SymFloat: an ATen call wants a Python number

    @property
    def dtype(self) -> DType:
        """Element type of the source, hence of the view."""
        return self.source.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


Value = Any  # Tensor | bool | int | float | Expr | None | torch.dtype | … and lists and tuples of those: FX's argument values
Lowering = Callable[..., Any]
Extern = Callable[..., Any]

# every operator plait lowers itself, by overload name ("aten.add.Tensor"); filled at import of the table modules only
LOWERINGS: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering under overload names such as "aten.add.Tensor"."""

    def register(fn: Lowering) -> Lowering:
        for name in names:
            if name in LOWERINGS and LOWERINGS[name] is not fn:
                raise KeyError(f"{name} has two lowerings")
            LOWERINGS[name] = fn
        return fn

    return register


def whole(node: Node) -> Tensor:
    """A node's value, seen as it is."""
    return Tensor(node, node.shape, identity(node.shape))


def normalize_dim(dim: int, ndim: int) -> int:
    """A dimension counted from the front; 0-dim tensors accept 0 and -1, as torch does."""
    d = dim + max(ndim, 1) if dim < 0 else dim
    if not 0 <= d < max(ndim, 1):
        raise IndexError(f"dimension {dim} of a {ndim}-dim tensor")
    return d


@dataclass
class Context:
    """Makes nodes for lowerings. `numerics`: "fused" or "eager"; `rng`: "plait" (counter-based) or "eager" (ATen's own)."""

    builder: Builder
    facts: Facts = field(default_factory=Facts)
    numerics: str = "fused"
    device: str = "cpu"
    rng: str = "plait"
    make_extern: Extern | None = None  # externs.make_extern, passed in so that it may use this module
    node_meta: Any = None  # the torch.fx.Node being lowered: its meta has eager's strides
    expected: tuple[tuple[Shape, DType | None], ...] = ()  # shape and type of each tensor result, as eager has them
    reason: str = ""  # why the lowering under way returned NotImplemented
    effects: list[Node] = field(default_factory=list)  # externs that must run though nobody reads them
    refusals: dict[Node, str] = field(default_factory=dict)  # why a node is an extern
    _serials: int = 0
    _seed: tuple[Tensor, Tensor] | None = None

    # ---------------------------------------------------------------- nodes
    def map(self, op: str, *args: Tensor, **attrs: Any) -> Tensor:
        """A pointwise node over the broadcast shape of `args`, which have the right types already."""
        args = self.broadcast(*args)
        shape = args[0].shape if args else ()
        return whole(self.builder.node(op, shape, [as_read(a) for a in args], **attrs))

    def reduce(self, op: str, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """Reduce over `dims` (none at all: over an extra axis of extent 1), kept as extent 1 on demand."""
        if not dims:
            return self.reduce(op, self.unsqueeze(x, x.ndim), [x.ndim])
        gone = sorted({normalize_dim(d, x.ndim) for d in dims})
        if x.ndim == 0:
            return self.reduce(op, self.unsqueeze(x, 0), [0])
        kept = [d for d in range(x.ndim) if d not in gone]
        moved = self.permute(x, [*kept, *gone])
        out = whole(self.builder.node(op, moved.shape, [as_read(moved)], reduce=len(gone)))
        if keepdim:
            for d in gone:
                out = self.unsqueeze(out, d)
        return out

    def scan(self, op: str, x: Tensor, dim: int) -> Tensor:
        """An inclusive scan along `dim`."""
        if x.ndim == 0:
            return self.reshape(self.scan(op, self.unsqueeze(x, 0), 0), ())
        d = normalize_dim(dim, x.ndim)
        order = [*(k for k in range(x.ndim) if k != d), d]
        moved = self.permute(x, order)
        out = whole(self.builder.node(op, moved.shape, [as_read(moved)]))
        return self.permute(out, [order.index(k) for k in range(x.ndim)])

    def cast(self, x: Tensor, dtype: DType, implicit: bool = False) -> Tensor:
        """x in another type; `implicit` casts are torch's promotion, which "fused" numerics may keep unrounded."""
        return x if x.dtype is dtype else self.map("cast", x, dtype=dtype, implicit=implicit)

    def const(self, value: Scalar, dtype: DType) -> Tensor:
        """A 0-dim constant; integers wrap as torch's conversion does."""
        if dtype is DType.b1:
            value = bool(value)
        elif dtype.is_float:
            value = float(value)
        else:
            value = int(value)
            bits = _INT_BITS[dtype]
            low = 0 if dtype is DType.u8 else -(1 << (bits - 1))
            value = (value - low) % (1 << bits) + low
        return whole(self.builder.node("const", (), dtype=dtype, value=value))

    def index(self, expr: Expr, shape: Shape) -> Tensor:
        """The i64 values of an index expression over the axes of `shape`."""
        return whole(self.builder.node("index", shape, expr=_drop_unit_axes((expr,), shape, self.over(shape))[0]))

    def scalar(self, v: Value, dtype: DType) -> Tensor:
        """A Python number, an Expr (SymInt) or a SymFloat's Tensor as a 0-dim value of `dtype`."""
        if isinstance(v, Tensor):
            return self.cast(v, dtype)
        if isinstance(v, Expr):
            if v.const is None:
                return self.cast(self.index(v, ()), dtype)
            v = v.const
        return self.const(v, dtype)

    def gather(self, x: Tensor, index: Sequence[Expr | Tensor], shape: Shape) -> Tensor:
        """Indirect read of x: an entry a dimension, an Expr in the new axes or an integer Tensor that broadcasts to `shape`
        and is not negative."""
        reads: list[Read] = []
        through: list[Expr] = []
        extents: dict[int, Expr] = {}
        for entry, extent in zip(index, x.shape, strict=True):
            if isinstance(entry, Expr):
                through.append(entry)
                continue
            k = len(reads) + 1
            reads.append(as_read(self.expand(entry, shape)))
            extents[k] = extent
            through.append(ix.value(k))
        if not reads:
            return self.view(x, shape, tuple(through))
        facts = Facts(shape, self.facts.symbols, extents)
        through = list(_drop_unit_axes(tuple(through), shape, facts))
        guard = tuple(g for g in compose(x.guard, tuple(through), facts) if not facts.is_nonneg(g))
        data = Read(x.source, compose(x.index, tuple(through), facts), guard, x.fill if guard else 0)
        return whole(self.builder.node("gather", shape, [data, *reads]))

    def pieces(self, parts: Sequence[Tensor], shape: Shape) -> Tensor:
        """The first part whose guard holds, point by point; parts are guarded views over the common `shape`."""
        return whole(self.builder.node("pieces", shape, [as_read(p) for p in parts]))

    def wrap_index(self, t: Tensor, extent: Expr) -> Tensor:
        """Indices as i64 with negative ones counted from the end."""
        t = self.cast(t, DType.i64)
        size = self.scalar(extent, DType.i64)
        return self.map("where", self.map("lt", t, self.const(0, DType.i64)), self.map("add", t, size), t)

    def extern(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        meta_val: Any,
        role: str = "opaque",
        reason: str = "",
    ) -> Any:
        """An ATen call; see externs.make_extern. A Tensor, a tuple of results, or whatever tree `meta_val` has."""
        assert self.make_extern is not None, "this Context was made without externs"
        return self.make_extern(self, target, args, kwargs, meta_val, role, reason)

    def seed(self) -> tuple[Tensor, Tensor]:
        """(seed, offset) for random nodes: one draw from torch's generator a run; streams differ by their `draw`."""
        if self._seed is None:
            top = torch.iinfo(torch.int64)
            kwargs = {"dtype": torch.int64, "device": torch.device(self.device)}
            meta = torch.empty((), dtype=torch.int64, device="meta")
            drawn = self.extern(torch.ops.aten.randint.low, (top.min, top.max, []), kwargs, meta, reason="random seed")
            self._seed = (drawn, self.const(0, DType.i64))
        return self._seed

    def serial(self) -> int:
        """A number no other node of this graph has: keeps effects and random draws from being interned together."""
        self._serials += 1
        return self._serials

    # ---------------------------------------------------------------- views
    def over(self, shape: Shape) -> Facts:
        """Facts for index expressions over the axes of `shape`."""
        return Facts(axes=shape, symbols=self.facts.symbols)

    def view(self, x: Tensor, shape: Shape, through: Shape, guard: Shape = (), fill: Scalar = 0) -> Tensor:
        """x seen in new axes: through[d] is old dimension d's index; `fill` where a guard is negative."""
        facts = self.over(shape)
        guard = tuple(g for g in _drop_unit_axes(guard, shape, facts) if not facts.is_nonneg(g))
        if guard and x.guard and repr(fill) != repr(x.fill):
            # one read has one fill: the inner padding becomes a value first
            x = self.map("copy", x)
        through = _drop_unit_axes(through, shape, facts)
        inner = tuple(g for g in compose(x.guard, through, facts) if not facts.is_nonneg(g))
        guards = tuple(dict.fromkeys((*inner, *guard)))
        return Tensor(x.source, shape, compose(x.index, through, facts), guards, fill if guard else x.fill)

    def expand(self, x: Tensor, shape: Sequence[Expr | int]) -> Tensor:
        """Broadcast to `shape` (-1 keeps an extent); extents of 1 stretch, dimensions are added in front."""
        lead = len(shape) - x.ndim
        new = [ix.to_expr(n) for n in shape]
        through: list[Expr] = []
        for d, old in enumerate(x.shape):
            if new[lead + d].const == -1:
                new[lead + d] = old
            through.append(ix.ZERO if old is ix.ONE else ix.axis(lead + d))
        out = tuple(new)
        return x if out == x.shape else self.view(x, out, tuple(through))

    def broadcast(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """All of `xs` over their common shape."""
        shape = broadcast_shape([x.shape for x in xs])
        return tuple(self.expand(x, shape) for x in xs)

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """A new dimension of extent 1 at `dim`, counted in the result."""
        d = normalize_dim(dim, x.ndim + 1)
        shape = (*x.shape[:d], ix.ONE, *x.shape[d:])
        return self.view(x, shape, tuple(ix.axis(k if k < d else k + 1) for k in range(x.ndim)))

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Result dimension k is old dimension dims[k]."""
        order = [normalize_dim(d, x.ndim) for d in dims]
        if order == list(range(x.ndim)):
            return x
        shape = tuple(x.shape[d] for d in order)
        return self.view(x, shape, tuple(ix.axis(order.index(d)) for d in range(x.ndim)))

    def reshape(self, x: Tensor, shape: Sequence[Expr | int]) -> Tensor:
        """Same elements in row-major order over `shape`, which has no -1 left."""
        new = tuple(ix.to_expr(n) for n in shape)
        if new == x.shape:
            return x
        return self.view(x, new, reshape_map(x.shape, new, self.over(new)))


def as_read(x: Tensor) -> Read:
    """The read of a view by a node whose axes start with the view's."""
    return Read(x.source, x.index, x.guard, x.fill if x.guard else 0)


def broadcast_shape(shapes: Iterable[Shape]) -> Shape:
    """torch's broadcast; extents that are not 1 are taken to agree, because the fake tensors checked it."""
    out: list[Expr] = []
    for shape in shapes:
        while len(out) < len(shape):
            out.insert(0, ix.ONE)
        for k in range(1, len(shape) + 1):
            if out[-k] is ix.ONE:
                out[-k] = shape[-k]
    return tuple(out)


def reshape_map(old: Shape, new: Shape, facts: Facts) -> Shape:
    """Index of each old dimension in the axes of `new`. Dimensions are matched in groups of equal products, so that only
    those that really merge or split get divisions."""
    if any(n is ix.ZERO for n in new):
        return (ix.ZERO,) * len(old)
    left = [d for d, n in enumerate(old) if n is not ix.ONE]
    right = [d for d, n in enumerate(new) if n is not ix.ONE]
    out = [ix.ZERO] * len(old)
    for olds, news in _groups([old[d] for d in left], [new[d] for d in right]):
        linear = ix.flatten([ix.axis(right[k]) for k in news], [new[right[k]] for k in news])
        for k, e in zip(olds, ix.unflatten(linear, tuple(old[left[k]] for k in olds), facts), strict=True):
            out[left[k]] = e
    return tuple(out)


def _groups(old: list[Expr], new: list[Expr]) -> list[tuple[range, range]]:
    """Cut both shapes wherever their prefix products agree."""
    ends: dict[Expr, int] = {}
    total = ix.ONE
    for k, n in enumerate(new):
        total = total * n
        ends[total] = k + 1
    out: list[tuple[range, range]] = []
    total, i, j = ix.ONE, 0, 0
    for k, n in enumerate(old):
        total = total * n
        end = ends.get(total)
        if end is not None and end > j:
            out.append((range(i, k + 1), range(j, end)))
            i, j = k + 1, end
    if i < len(old) or j < len(new):
        # products that agree in value only (symbols): one group for what is left
        out.append((range(i, len(old)), range(j, len(new))))
    return out


def _drop_unit_axes(exprs: Shape, shape: Shape, facts: Facts) -> Shape:
    """Axes of extent 1 are 0: one spelling for each map."""
    env = {ix.axis_atom(d): ix.ZERO for d, n in enumerate(shape) if n is ix.ONE}
    return tuple(e.substitute(env, facts) for e in exprs) if env else exprs
