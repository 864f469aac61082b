"""Processes that train for others: they do not outlive the one that started them, and keep the memory they have."""

import ctypes
import os
import signal
import sys

from fedalloy.errors import FedAlloyError

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PER_CORE = 16  # processes at most
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def require_cores(flag: str, wanted: int) -> None:
    """Refuse more processes than this machine bears: each holds a few hundred megabytes."""
    cores = len(os.sched_getaffinity(0))
    if wanted > (most := PER_CORE * cores):
        raise FedAlloyError(f"{flag} {wanted} is too much for {cores} cores; give {most} at most")


def die_with(parent: int, how: signal.Signals) -> None:
    """Called in a new process: the signal that it gets when its parent is gone, however that went."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)


def keep_memory() -> None:
    """By default glibc hands every large block back to the system, and each step faults it in again, page by page."""
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc takes
        mallopt(M_TRIM_THRESHOLD, 2**30)
