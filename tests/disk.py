"""A disk that is full, as nearly as a test can make one."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disk_with(size: int) -> Iterator[None]:
    """No file may grow beyond this many bytes: the system refuses, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
