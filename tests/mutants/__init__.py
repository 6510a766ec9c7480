"""Planted bugs: each breaks one promise, and a suite of ours must notice it."""
