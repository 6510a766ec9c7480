"""Deterministic simulation of control over the fake engine: every trouble drawn from one seed."""
