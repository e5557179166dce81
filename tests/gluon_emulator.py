"""Runs emitted Gluon modules on CPU tensors: blocks one after the other, the parts of a block on threads of their own.

What it keeps of the machine: a barrier has a count of arrivals and of bytes, and phases; a wait ends when its phase is over,
fails when all groups wait, and is two waits: the fastest warp's, and the slowest one's at the next point where the group's
warps meet. When the groups part, what none of them is given is overwritten by what they are given: barriers too, before
slower warps have seen them. When they end, no phase is half over and no copy has come that nobody waited for. Copies fill with zeros what lies beyond a view. Products that are issued read their tiles as late
as they may, when they are waited for, so that a tile given back too early is seen overwritten. Shared memory starts as NaN.
Layouts mean nothing here: the compiler checks them.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import ptx
import torch

from plait.emit.gluon import GluonSource
from plait.ir.dtype import DType
from plait.runtime.sizes import Sizes

_TORCH = {DType.bf16: torch.bfloat16, DType.f16: torch.float16}
_local = threading.local()


class Stuck(Exception):
    """A barrier that nobody completes."""


class Block:
    """What a block has: groups of warps that run, those of them that wait, and its shared memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 1
        self.waiting: dict[int, tuple[Barrier, int]] = {}
        self.barriers: list[Barrier] = []
        self.tiles: list[torch.Tensor] = []

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Until a phase is over; fails as soon as every group waits for one that is not."""
        with self.changed:
            self.waiting[threading.get_ident()] = barrier, parity
            try:
                while not barrier.over(parity):
                    if len(self.waiting) == self.running and not any(b.over(p) for b, p in self.waiting.values()):
                        raise Stuck(f"every group waits; {barrier}")
                    self.changed.notify_all()
                    self.changed.wait()
            finally:
                del self.waiting[threading.get_ident()]

    def ended(self) -> None:
        """A group has."""
        with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def overwrite(self, given: Sequence[Any]) -> None:
        """What no group is given is dead: its memory takes what the groups are given. Of a barrier that says that its
        first phase is not over."""
        kept = {id(b) for x in given for b in _barriers_of(x)}
        storages = {_storage(x.data) for x in given if isinstance(x, Shared) and isinstance(x.data, torch.Tensor)}
        for b in self.barriers:
            if id(b) not in kept:
                b.phase, b.dead = 0, True
        for t in self.tiles:
            if _storage(t) not in storages:
                t.fill_(float("nan"))

    def check_end(self) -> None:
        """Nothing is left half done."""
        for b in self.barriers:
            assert b.dead or (b.bytes == 0 and b.arrivals == b.count), f"a phase is half over: {b}"
            assert b.dead or not b.copies or b.waited == b.phase, f"a tile comes that nobody waits for: {b}"


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _barriers_of(x: Any) -> list[Barrier]:
    if isinstance(x, Barrier):
        return [x]
    return x.data if isinstance(x, Shared) and isinstance(x.data, list) else []


class Barrier:
    """One mbarrier. `phase` counts those that are over, `waited` those that somebody has waited for."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.count = self.arrivals = self.bytes = self.phase = self.waited = 0
        self.copies = self.dead = False

    def __str__(self) -> str:
        return f"phase {self.phase}, {self.arrivals} arrivals and {self.bytes} bytes missing"

    def init(self, count: int) -> None:
        self.count = self.arrivals = count

    def over(self, parity: int) -> bool:
        """Whether the phase of that parity is: all that a barrier tells."""
        return self.phase & 1 != parity

    def _settle(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.phase += 1
            self.arrivals = self.count
            self.block.changed.notify_all()

    def arrive(self, bytes_: int = 0) -> None:
        with self.block.changed:
            assert not self.dead, "a barrier is used whose memory is something else's"
            assert self.arrivals > 0, "more arrivals than the barrier counts"
            self.bytes += bytes_
            self.copies |= bytes_ > 0
            self.arrivals -= 1
            self._settle()

    def complete(self, bytes_: int) -> None:
        with self.block.changed:
            self.bytes -= bytes_
            self._settle()

    def wait(self, parity: int) -> None:
        """Of the fastest warp; the slowest still waits until its group's warps meet."""
        self.block.wait(self, parity)
        self.waited = max(self.waited, self.phase)
        if _local.warps > 1:
            _local.behind.append((self, parity))


def _meet() -> None:
    """All warps of a group have come to one point."""
    for barrier, parity in _local.behind:
        if not barrier.over(parity):
            raise Stuck(f"slower warps wait for ever; {barrier}")
    _local.behind.clear()


def _arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
    """The compiler lets the warps meet before one of them arrives."""
    assert count == 1
    _meet()
    if pred:
        barrier.arrive()


class Shared:
    """Shared memory, or a part or another view of it."""

    def __init__(self, data: Any, leaving: list[Any] | None = None) -> None:
        self.data = data
        self.leaving = [] if leaving is None else leaving  # copies to memory that may still read it

    def index(self, i: int) -> Any:
        found = self.data[i]
        return found if isinstance(found, Barrier) else Shared(found)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape), self.leaving)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def store(self, value: torch.Tensor) -> None:
        assert not self.leaving, "a tile is overwritten before it has left"
        self.data.copy_(value)


class View:
    """A descriptor of a tensor."""

    def __init__(self, flat: torch.Tensor, d: Any, shape: Sequence[int]) -> None:
        self.data = flat.as_strided(list(shape), list(d.strides), flat.storage_offset() + d.offset)
        self.block = list(d.block)
        self.layout = None
        bytes_ = torch.Size(self.block).numel() * flat.element_size()
        self.block_type = types.SimpleNamespace(shape=self.block, nbytes=bytes_)

    def copy(self, at: Sequence[int], barrier: Barrier, to: Shared) -> None:
        to.data.zero_()
        here = tuple(slice(a, a + n) for a, n in zip(at, self.block, strict=True))
        part = self.data[here]
        to.data[tuple(slice(0, n) for n in part.shape)] = part
        barrier.complete(self.block_type.nbytes)

    def leave(self, at: Sequence[int], tile: Shared) -> None:
        """A copy to memory: it reads the tile as late as it may."""
        here = tuple(slice(a, a + n) for a, n in zip(at, self.block, strict=True))
        part = self.data[here]

        def run() -> None:
            part.copy_(tile.data.view(self.block)[tuple(slice(0, n) for n in part.shape)])
            tile.leaving.clear()

        assert _local.fenced, "a tile leaves before what was stored to it is seen"
        _local.fenced = False
        tile.leaving.append(run)
        _local.leaving.append(run)


def _store_wait(pending: int) -> None:
    done, _local.leaving = _local.leaving[: len(_local.leaving) - pending], _local.leaving[-pending:] if pending else []
    for run in done:
        run()


def _fence() -> None:
    _local.fenced = True


class Pointer:
    """A tensor's address, or addresses in it."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)


class Issued:
    """A product on its way."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.run, self.value = run, None

    def finish(self) -> None:
        if self.value is None:
            self.value = self.run()


def _warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    def run() -> torch.Tensor:
        left = a.data if isinstance(a, Shared) else a
        product = left.float() @ b.data.float()
        before = acc.value if isinstance(acc, Issued) else acc
        return before + product if use_acc else product

    assert is_async
    _local.issued.append(Issued(run))
    return _local.issued[-1]


def _warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    done = _local.issued[: len(_local.issued) - outstanding]
    for issued in done:
        issued.finish()
    _local.issued = _local.issued[len(done) :]
    if len(deps) > 1:  # what is still under way may be added to, not used
        return tuple(d if d.value is None else d.value for d in deps)
    (dep,) = deps
    assert dep.value is not None, "a product is used before it is waited for"
    return dep.value


def _cast(x: Any, to: Any) -> Any:
    return x.to(to) if isinstance(x, torch.Tensor) else x


def _load(p: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
    offset = torch.as_tensor(p.offset)
    if mask is None:
        return p.flat[offset]
    mask, offset = torch.broadcast_tensors(torch.as_tensor(mask), offset)
    return torch.where(mask, p.flat[torch.where(mask, offset, 0)], torch.tensor(other, dtype=p.flat.dtype))


def _store(p: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    offset, value = torch.broadcast_tensors(torch.as_tensor(p.offset), value)
    keep = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand_as(offset)
    p.flat[offset[keep]] = value[keep].to(p.flat.dtype)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    block: Block = _local.block
    if layout == "barrier":
        found = [Barrier(block) for _ in range(shape[0])]
        block.barriers += found
        return Shared(found) if len(shape) > 1 else found[0]
    block.tiles.append(torch.full(list(shape), float("nan"), dtype=dtype))
    return Shared(block.tiles[-1])


def _reduce(x: torch.Tensor, axis: int, fn: Callable[[Any, Any], Any]) -> torch.Tensor:
    parts = list(x.unbind(axis))
    while len(parts) > 1:
        parts = [fn(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _where(c: Any, a: Any, b: Any) -> torch.Tensor:
    like = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float32)
    a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like) for x in (a, b))
    return torch.where(torch.as_tensor(c), a, b)


def _extreme(name: str) -> Callable[..., Any]:
    def run(a: Any, b: Any, propagate_nan: Any = None) -> Any:
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return max(a, b) if name == "maximum" else min(a, b)
        return getattr(torch, name)(torch.as_tensor(a), torch.as_tensor(b))

    return run


def _assembly(text: str, constraints: str, args: Sequence[torch.Tensor], *, pack: int, **_: Any) -> torch.Tensor:
    return torch.from_numpy(ptx.run(text, constraints, args[0].numpy(), pack))


def _start(block: Block, warps: int) -> None:
    """A thread is a group of a block's warps."""
    _local.block, _local.warps, _local.behind = block, warps, []
    _local.issued, _local.leaving, _local.fenced = [], [], False


def _specialize(
    parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Sequence[int], registers: Sequence[int]
) -> None:
    block: Block = _local.block
    errors: list[BaseException] = []
    block.overwrite([x for _, args in parts for x in args])
    _meet()

    def run(fn: Callable[..., None], args: tuple[Any, ...], warps: int) -> None:
        _start(block, warps)
        try:
            fn(*args)
            _meet()
            assert not _local.issued, "a product is never waited for"
            assert not _local.leaving, "a result has not left when its block ends"
        except BaseException as error:
            errors.append(error)
        block.ended()

    block.running = len(parts)
    threads = [threading.Thread(target=run, args=(*part, n)) for part, n in zip(parts, [4, *warps], strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:  # where a group fails, others get stuck
        raise min(errors, key=lambda e: isinstance(e, Stuck))
    block.check_end()


def _language(block: Callable[[], int], blocks: int) -> Any:
    dtypes = {
        n: getattr(torch, n)
        for n in ["int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64"]
    }
    plain = {
        n: getattr(torch, n)
        for n in ["abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt"]
    }
    fns = {
        "int1": torch.bool,
        "constexpr": None,
        "arange": lambda a, b, layout: torch.arange(a, b, dtype=torch.int32),
        "full": lambda shape, v, dtype, layout=None: torch.full(shape, v, dtype=dtype),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "zeros_like": torch.zeros_like,
        "cast": _cast,
        "load": _load,
        "store": _store,
        "where": _where,
        "maximum": _extreme("maximum"),
        "minimum": _extreme("minimum"),
        "fma": lambda a, b, c: (a.double() * b + c).float(),
        "div_rn": lambda a, b: a / b,
        "sqrt_rn": torch.sqrt,
        "sum": lambda x, axis: x.sum(axis),
        "reduce": _reduce,
        "convert_layout": lambda x, layout: x,
        "allocate_shared_memory": _allocate,
        "static_range": range,
        "inline_asm_elementwise": _assembly,
        "program_id": lambda axis: block(),
        "num_programs": lambda axis: blocks,
        "warp_specialize": _specialize,
    }
    layouts = {
        n: (lambda *a, **k: None)
        for n in ("NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMASharedLayout")
    }
    return types.SimpleNamespace(**dtypes, **plain, **fns, **layouts)


def run(source: GluonSource, tensors: Sequence[torch.Tensor], numbers: Sequence[int] = ()) -> None:
    """Run every block of a kernel. `tensors` are the program's buffers, as flat as memory is."""
    current = [0]
    values = dict(zip(source.numbers, numbers, strict=True))
    flats = [
        t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,)) for t in tensors
    ]
    blocks = Sizes(values).one(source.programs)
    space: dict[str, Any] = {
        "gl": _language(lambda: current[0], blocks),
        "tl": types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=None)),
        "gluon": types.SimpleNamespace(jit=lambda f: f),
        "libdevice": types.SimpleNamespace(
            tanh=torch.tanh, fast_dividef=torch.div, exp=torch.exp, expm1=torch.expm1, log1p=torch.log1p
        ),
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=lambda b, count: b.init(count),
            wait=lambda b, phase: b.wait(phase),
            arrive=_arrive,
            expect=lambda b, n: b.arrive(n),
        ),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=lambda d, at, b, to: d.copy(at, b, to),
            async_copy_shared_to_global=lambda d, at, tile: d.leave(at, tile),
            store_wait=_store_wait,
        ),
        "fence_async_shared": _fence,
        "warpgroup_mma": _warpgroup_mma,
        "warpgroup_mma_wait": _warpgroup_mma_wait,
    }
    text = re.sub(r"(?m)^(import|from) .*\n", "", source.text)
    exec(re.sub(r"\.to\((gl\.\w+), bitcast=True\)", r".view(\1)", text), space)  # the module that we emitted
    args: list[Any] = [View(flats[d.buffer], d, [Sizes(values).one(n) for n in d.shape]) for d in source.descriptors]
    args += [Pointer(flats[a.index]) if a.kind == "buffer" else values[a.name] for a in source.args]
    for block in range(blocks):
        current[0] = block
        _start(Block(), 4)
        space[source.name](*args)
