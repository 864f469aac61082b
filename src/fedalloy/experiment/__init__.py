"""Whole runs: settings, folders, records."""
