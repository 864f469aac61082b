"""How tests run: one thread for each process, files in memory if there is room, some parts of the contract once."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import fuzzing  # noqa: F401  which profile hypothesis takes

ROOM = 4 * 2**30  # bytes; a whole session of tests leaves about a tenth of it
MEMORY = Path("/dev/shm")

# Before torch is imported: some tests fork, which threads do not survive.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in the background deaf to Ctrl-C, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Thousands of small runs sync their files; on a disk the processes of a federation would wait for them.
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    repeated = {
        item
        for item in items
        if item.get_closest_marker("once_per_method") and not item.get_closest_marker("first_model")
    }
    config.hook.pytest_deselected(items=list(repeated))
    items[:] = [item for item in items if item not in repeated]
