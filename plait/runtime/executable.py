"""Executable: runs a Script over built kernels. The step values are re-exported here."""

from __future__ import annotations

from plait.runtime.steps import (
    AllocStep,
    CopyStep,
    EagerStep,
    ExternStep,
    FreeStep,
    InputOut,
    InputSlot,
    KernelStep,
    NoneOut,
    OperandView,
    ReturnSpec,
    ScalarOut,
    Script,
    SlotOut,
    Step,
    ViewOut,
)

__all__ = [
    "AllocStep",
    "CopyStep",
    "EagerStep",
    "ExternStep",
    "FreeStep",
    "InputOut",
    "InputSlot",
    "KernelStep",
    "NoneOut",
    "OperandView",
    "ReturnSpec",
    "ScalarOut",
    "Script",
    "SlotOut",
    "Step",
    "ViewOut",
]
