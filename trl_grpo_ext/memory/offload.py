"""Keep what the backward pass needs in host memory between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

# A copy of fewer bytes costs more time than its memory is worth.
_MIN_BYTES = 64 * 1024


class HostOffload(saved_tensors_hooks):
    """A context in which tensors saved for the backward pass move to the host and come back when it needs them.

    Weights stay: they are on the device anyway. Copies run on the current stream, so that no other synchronisation is
    needed. TRL's manager of this kind expects every saved tensor to be used, which a loss that leaves out the entropies
    does not do.

    Args:
        model: Its parameters and buffers are left alone.
        device_type: Tensors on this kind of device are moved.
        min_bytes: Smaller tensors stay.
    """

    def __init__(self, model: nn.Module, device_type: str, min_bytes: int = _MIN_BYTES) -> None:
        self.num_moved_bytes = 0
        storages = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        pins = device_type == "cuda"

        def pack(tensor: torch.Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            if tensor.device.type != device_type or size < min_bytes:
                return tensor
            if tensor.untyped_storage().data_ptr() in storages:
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
            host.copy_(tensor, non_blocking=True)
            self.num_moved_bytes += size
            return tensor.device, host

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, host = packed
            # On the CPU (in tests) the copy itself is what comes back.
            return host.to(device, non_blocking=True)

        super().__init__(pack, unpack)
