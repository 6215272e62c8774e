"""The allocator's settings, in a process of their own."""

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
from extproc.adapters.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def body():
    return len([b"x" * 1_000_000 for _ in range(8)])

assert keep_freed_memory()
for _ in range(5):
    body()
before = faults()
for _ in range(20):
    body()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_memory_of_bodies_is_used_again_without_faulting_it_in():
    command = [sys.executable, "-c", COUNT_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    # 160 MB in pages of 4 KB are 39,000 faults.
    assert int(done.stdout) < 1_000
