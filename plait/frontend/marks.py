"""Marks on a joint graph's nodes that the partition between forward and backward follows. The user's own, from
torch.utils.checkpoint, stand: inside such a region the user gets what eager's checkpoint gives."""

from __future__ import annotations

from torch import fx

EQUALITY = ("aten.eq.Tensor", "aten.ne.Tensor")
"""Operators whose operands must be the very values of the forward: the gradient of amax asks which element was the maximum."""


def keep(node: fx.Node) -> None:
    """Save the value for the backward, if it needs it; never compute it a second time."""
    from torch.utils.checkpoint import CheckpointPolicy

    if node.meta.get("recompute") is None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def form_again(node: fx.Node) -> None:
    """Compute the value a second time in the backward, if it needs it; never save it."""
    from torch.utils.checkpoint import CheckpointPolicy

    if node.meta.get("recompute") is None:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta.setdefault("ac_graph_id", 0)
