"""Shoal: one AI cluster out of many machines."""

__version__ = "0.1.0"
