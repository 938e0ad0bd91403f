"""What `minillm bench` counts in bytes: weights, what a decode step reads, a process's memory."""

from collections.abc import Iterable
from pathlib import Path

import torch

from .kv_cache import cache_bytes

STATUS = Path("/proc/self/status")  # Linux: what the kernel knows about this process
MEMORY = ("peak_memory_bytes", "held_memory_bytes", "trimmed_memory_bytes")


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all these tensors, those at the same address once."""
    # without storage, as on the meta device, all addresses are 0
    return sum({t.data_ptr() or id(t): t.nbytes for t in tensors}.values())


def weight_bytes(model: torch.nn.Module) -> int:
    """What a model holds, in bytes: its parameters and its buffers, where codes and scales are."""
    return distinct_bytes([*model.parameters(), *model.buffers()])


def bytes_per_step(model, positions: int, batch: int = 1) -> int:
    """What one decode step reads: weights, and keys and values of that many positions, in bytes."""
    # of an embedding it reads a row or two: a table counts only where it is the head as well
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    read = distinct_bytes(tensor for name, tensor in named if "embedding" not in name)
    itemsize = next(model.parameters()).itemsize  # the cache's too
    return read + cache_bytes(*model.config.cache_shape, positions, itemsize) * batch


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them: "VmRSS", resident now, or "VmHWM", the most."""
    return int(STATUS.read_text().split(f"{field}:")[1].split()[0]) * 1024
