"""Files that only one process writes at a time, on every system; the lock goes with the process, however it ends."""

import errno
import os
import sys

# Open a file that is ours: a link in its place is refused, a pipe does not block. Windows has neither flag.
OWN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

if sys.platform == "win32":
    import msvcrt

    HELD = (errno.EACCES, errno.EDEADLK)  # what Windows says at once, and after it waited for ten seconds

    def lock(file: int, *, wait: bool) -> None:
        """Lock an open file until it is closed; raise BlockingIOError if it is locked and we do not wait."""
        while True:
            try:
                msvcrt.locking(file, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if error.errno not in HELD:
                    raise
                if not wait:
                    raise BlockingIOError(*error.args) from None

else:
    import fcntl

    def lock(file: int, *, wait: bool) -> None:
        """Lock an open file until it is closed; raise BlockingIOError if it is locked and we do not wait."""
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
