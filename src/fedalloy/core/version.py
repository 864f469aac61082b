"""The one place that knows the version."""

VERSION = "0.2.0"
