"""Which DeviceSpec a device of torch's has."""

from __future__ import annotations

import torch

from plait.plan.device import DeviceSpec, spec_for


def spec_of(device: str) -> DeviceSpec:
    """Of "cpu", or of the card that "cuda:0" is."""
    if not device.startswith("cuda"):
        return spec_for("cpu")
    return spec_for("cuda", torch.cuda.get_device_name(device) if torch.cuda.is_available() else "")
