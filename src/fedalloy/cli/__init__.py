"""The command line."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    from fedalloy.cli import app  # slow to import, and not needed by who only wants a table

    app.main(arguments)
