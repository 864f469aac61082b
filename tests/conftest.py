"""How tests run: one thread for each process, and files in memory if there is room."""

import os
import shutil
import tempfile
from pathlib import Path

ROOM = 4 * 2**30  # bytes; a whole session of tests leaves about a tenth of it
MEMORY = Path("/dev/shm")

# Before torch is imported: some tests fork, which threads do not survive.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Thousands of small runs sync their files; on a disk the processes of a federation would wait for them.
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
