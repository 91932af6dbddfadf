"""Ask glibc to keep what a step frees for the next step, where the CPU trains.

By default glibc gives blocks above 32 MiB back to the system the moment they are freed, and the top of its heap as soon
as that is worth 64 MiB. A training step allocates and frees gigabytes of activations, so every step pays for fresh
pages again: the system clears each before it hands it out. Tensors of odd sizes, each in pages of its own, also hold
more memory than a heap in which freed blocks are used again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

# malloc.h; values are C ints.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = (2**30, 2**25)
"""Sizes from which blocks get a mapping of their own; glibc before 2.35 refuses more than the second."""


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make this process reuse freed memory instead of returning it; whoever configured glibc's malloc keeps that.

    Between steps the process holds what it held in them; its peak was lower in every job measured
    (docs/performance.md). No result changes.

    Args:
        environ: ``MALLOC_…`` or ``glibc.malloc`` in ``GLIBC_TUNABLES`` there switches this off.

    Returns:
        Whether it was done: False without glibc, or where the environment has settings of its own.
    """
    is_configured = any(name.startswith("MALLOC_") for name in environ)
    if not sys.platform.startswith("linux") or is_configured or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return False
    is_kept = any(process.mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return is_kept and bool(process.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
