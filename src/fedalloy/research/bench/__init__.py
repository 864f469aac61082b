"""Benchmarks: everything is measured beside a yardstick in the same run, and only ratios are worth quoting."""
