"""placeholder"""

from fedalloy.reproduce.grid import Grid

ITEMS: dict[str, Grid] = {}
