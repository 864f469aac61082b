"""Processes that train for others: they do not outlive the one that started them, and keep the memory they have."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from fedalloy.errors import FedAlloyError

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PER_CORE = 16  # processes at most
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def cores() -> int:
    """The cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # on Linux alone
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def require_cores(flag: str, wanted: int) -> None:
    """Refuse more processes than this machine bears: each holds a few hundred megabytes."""
    if wanted > (most := PER_CORE * cores()):
        raise FedAlloyError(f"{flag} {wanted} is too much for {cores()} cores; give {most} at most")


def die_with(parent: int, how: signal.Signals) -> None:
    """Called in a new process: the signal that it gets when its parent is gone, however that went."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)


def end_after(pid: int, pause: float = 0.5) -> None:
    """End this process, whatever it does, when that one is gone, which need not have started it."""

    def watch() -> None:
        while is_alive(pid):
            time.sleep(pause)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is over, and that nobody has taken note of yet, does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's, or a system without /proc
        return True


def keep_memory() -> None:
    """By default glibc hands every large block back to the system, and each step faults it in again, page by page."""
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc takes
        mallopt(M_TRIM_THRESHOLD, 2**30)
