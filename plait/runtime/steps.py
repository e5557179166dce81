"""The flat script of a compiled graph, as values: what `compiler.py` writes and `Executable` runs. Free of torch.

Values live in numbered slots. Slots are filled by inputs, `AllocStep`, `ExternStep` and `EagerStep`; a kernel writes into
slots that were allocated before. Every Expr here is over symbols only (`Script.bindings` says where they come from).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.ir.dtype import DType
from plait.ir.graph import Graph, Node
from plait.ir.index import Expr

Exprs = tuple[Expr, ...]
# As in ir/bindings.py, with ("slot", slot, dim) in place of ("extern", node, item, dim): a size of the tensor that a step puts
# into the slot, or, with dim None, the number itself. Symbols come after those they are derived from.
Binding = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class InputSlot:
    """The argument at `position` fills `slot`. `dtype` of a Python scalar says how it is stored when a kernel reads it (it
    becomes a 0-d tensor on the script's device); None for a tensor argument. One that a forward of ours left with its rows
    apart (`strides`) may come back otherwise, through the user's hooks for saved tensors."""

    position: int
    slot: int
    dtype: DType | None = None
    strides: Exprs | None = None


@dataclass(frozen=True, slots=True)
class AllocStep:
    """Memory for `slot`. With `reuse` it is the memory of that slot, of the same size, type and device, if nobody else refers
    to it: kernel number `kernel` reads it for the last time, each element before it writes the one in its place."""

    slot: int
    shape: Exprs
    strides: Exprs
    dtype: DType
    device: str
    reuse: int | None = None
    kernel: int = -1


@dataclass(frozen=True, slots=True)
class FreeStep:
    """The last use of `slot` is past."""

    slot: int


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Launch kernel number `kernel` of the executable on `buffers`, in its argument order, with `symbols` as its i64
    parameters. `messages[part][code - 1]` says what a failed Check means. `name` is for people, as is `where`, the user's lines."""

    kernel: int
    buffers: tuple[int, ...]
    symbols: Exprs = ()
    messages: tuple[tuple[str, ...], ...] = ()
    name: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class OperandView:
    """A strided view of `slot`'s memory, in elements from the first element of the slot's tensor. With `whole` the slot's
    tensor is passed as it is and the rest is ignored."""

    slot: int
    shape: Exprs = ()
    strides: Exprs = ()
    offset: Expr | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ExternStep:
    """Call the ATen (or other) operator `target` with `template` filled in. `outs[i]` is the slot of the i-th result, None
    where nobody reads it. With `inplace` = k the call writes into operand k (`target` still names the functional form, as
    "aten.index_put.default") and the result shares its memory. With `into` the result is written
    into its slot, which was allocated before. `expects[i]` are the shape and strides readers of the i-th result rely on; a
    result that comes otherwise is copied into them."""

    target: str
    template: Any
    operands: tuple[OperandView, ...]
    outs: tuple[int | None, ...]
    role: str = ""
    inplace: int | None = None
    origin: str = ""
    expects: tuple[tuple[Exprs, Exprs] | None, ...] = ()
    into: bool = False


@dataclass(frozen=True, slots=True)
class LoopStep:
    """Run loop number `loop` of the executable, a script of its own, `count` times: on the operands, the tensors in `into`
    (allocated before, filled with zeros here) and the block's number, of which its symbol is bound once a block."""

    loop: int
    count: int
    operands: tuple[OperandView, ...]
    into: tuple[int, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class EagerStep:
    """Evaluate `outputs` of a group by the reference evaluator, because its kernel could not be built: `inputs` say which
    slot holds each value that the group reads, `slots` where each output's value goes (allocated before, copied into)."""

    graph: Graph
    inputs: tuple[tuple[Node, int], ...]
    outputs: tuple[Node, ...]
    slots: tuple[int, ...]
    mode: str = "fused"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """target[...] = source: write a functionalised mutation back. `shape` is the logical shape of both."""

    target: OperandView
    source: OperandView


Step = AllocStep | FreeStep | KernelStep | ExternStep | EagerStep | CopyStep | LoopStep


@dataclass(frozen=True, slots=True)
class SlotOut:
    """Return the tensor of a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class ViewOut:
    """Return a strided view of a slot's memory; `offset` in elements from the slot's first element."""

    slot: int
    shape: Exprs
    strides: Exprs
    offset: Expr | None = None


@dataclass(frozen=True, slots=True)
class InputOut:
    """Return an argument as it came."""

    position: int


@dataclass(frozen=True, slots=True)
class NoneOut:
    """Return None."""


@dataclass(frozen=True, slots=True)
class ScalarOut:
    """Return a number: a formula of ir/bindings.py (an Expr is one) at the call's symbols."""

    value: Any


@dataclass(frozen=True, slots=True)
class ItemOut:
    """Return the value of a one-element slot as a Python number."""

    slot: int


@dataclass(frozen=True, slots=True)
class ValueOut:
    """Return a constant."""

    value: Any


ReturnSpec = SlotOut | ViewOut | InputOut | NoneOut | ScalarOut | ItemOut | ValueOut


@dataclass(frozen=True, slots=True)
class Script:
    """Everything `Executable` needs beside the built kernels. `arity` counts the arguments of the call and, after them, the
    constants that the Executable holds."""

    arity: int
    slots: int
    inputs: tuple[InputSlot, ...]
    steps: tuple[Step, ...]
    returns: tuple[ReturnSpec, ...]
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    device: str = "cpu"
    name: str = "graph"
