"""Flower's SuperNode, with a shorter pause between two looks for messages: its three seconds are most of a short round.

python node.py SECONDS ARGUMENTS-OF-FLOWER-SUPERNODE
"""

import os
import sys
import time
from typing import Any

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode


class Impatient:
    """The module `time`, except that nobody sleeps longer than this."""

    def __init__(self, most: float) -> None:
        self.most = most

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.most))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    pause = float(sys.argv.pop(1))
    vars(start_client_internal)["time"] = Impatient(pause)
    flower_supernode()
    # It comes back only if its connection broke for good, and a thread of its own would keep it: whoever started it
    # has to see that, and starts it again, with the certificates and keys of then
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
