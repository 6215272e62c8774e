"""The C library's allocator, told to keep what large bodies used for the next ones.

Left to itself glibc gives a megabyte back to the system when a body is done, and the next
body faults every page in again: a fifth of the time of a 1 MB body.
"""

from __future__ import annotations

import ctypes

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024 * 1024
# Larger pieces, rare ones, still go back at once.
_LARGEST_KEPT_BYTES = 8 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Keep at most 64 MB at hand; False where the C library is none that can be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    kept = mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
