"""Look at methods and finished runs."""
