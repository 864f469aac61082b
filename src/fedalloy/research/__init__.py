"""Studies of many runs: compare, tune, reproduce, bench."""
