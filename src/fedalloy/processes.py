"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int, how: signal.Signals) -> None:
    """Called in a new process: the signal that it gets when its parent is gone, however that went."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)
