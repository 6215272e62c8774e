"""Bytes per block and endpoint of the forms an index could have; the figures of decision 0001.

`python -m bench.index_forms [FORM HOLDERS]`: without arguments every form in a process of
its own, with 1,000,000 blocks on 100 endpoints, each block held by 1, 2 or 4 of them.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array
from pathlib import Path

_HOLDINGS = 1_000_000
_ENDPOINTS = 100
_PROBES = 200_000


def _draw(holders: int) -> list[tuple[int, list[int]]]:
    chance = random.Random(1)
    return [
        (chance.getrandbits(64), chance.sample(range(_ENDPOINTS), holders))
        for _ in range(_HOLDINGS // holders)
    ]


def _dict_per_endpoint(blocks: list[tuple[int, list[int]]]) -> object:
    held: list[dict[int, None]] = [{} for _ in range(_ENDPOINTS)]
    for block, holders in blocks:
        for holder in holders:
            # A chain arrives anew with every request, so endpoints share no integers.
            held[holder][int(str(block))] = None
    return held


def _shared_masks(blocks: list[tuple[int, list[int]]]) -> object:
    return {int(str(block)): sum(1 << h for h in holders) for block, holders in blocks}


def _shared_tuples(blocks: list[tuple[int, list[int]]]) -> object:
    return {int(str(block)): tuple(holders) for block, holders in blocks}


def _open_addressing(blocks: list[tuple[int, list[int]]]) -> object:
    """A table per endpoint, half full: 8 bytes of hash, 4 of age for the eviction."""
    size = 1 << (2 * _HOLDINGS // _ENDPOINTS - 1).bit_length()
    tables = [(array("Q", bytes(8 * size)), array("I", bytes(4 * size))) for _ in range(_ENDPOINTS)]
    for age, (block, holders) in enumerate(blocks):
        for holder in holders:
            hashes, ages = tables[holder]
            slot = block & (size - 1)
            while hashes[slot]:
                slot = (slot + 1) & (size - 1)
            hashes[slot], ages[slot] = block, age
    return tables


def _probe_ns(form: str, built: object, blocks: list[tuple[int, list[int]]]) -> float:
    """Time to look one block up on one endpoint, loop included."""
    chosen = [(block, holders[0]) for block, holders in blocks[:_PROBES]]
    began_s = time.thread_time()
    if form == "dict_per_endpoint":
        for block, holder in chosen:
            _ = block in built[holder]
    elif form == "open_addressing":
        for block, holder in chosen:
            hashes = built[holder][0]
            slot = block & (len(hashes) - 1)
            while hashes[slot] not in {0, block}:
                slot = (slot + 1) & (len(hashes) - 1)
    elif form == "shared_masks":
        for block, holder in chosen:
            _ = built[block] >> holder & 1
    else:
        for block, holder in chosen:
            _ = holder in built[block]
    return (time.thread_time() - began_s) / len(chosen) * 1e9


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1_024


def _measure(form: str, holders: int) -> None:
    blocks = _draw(holders)
    before = _resident_bytes()
    built = _FORMS[form](blocks)
    each = (_resident_bytes() - before) / _HOLDINGS
    probe_ns = _probe_ns(form, built, blocks)
    print(f"{form:18} {holders} holders: {each:6.1f} B each, {probe_ns:5.0f} ns a look-up")


_FORMS = {
    "dict_per_endpoint": _dict_per_endpoint,
    "shared_masks": _shared_masks,
    "shared_tuples": _shared_tuples,
    "open_addressing": _open_addressing,
}

if __name__ == "__main__":
    if sys.argv[1:]:
        _measure(sys.argv[1], int(sys.argv[2]))
    else:
        for name in _FORMS:
            for number in (1, 2, 4):
                command = (sys.executable, "-m", "bench.index_forms", name, str(number))
                subprocess.run(command, check=True, timeout=300)
