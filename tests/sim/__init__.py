"""Deterministic simulation of model, control and the fake engine: every crash, delay and duplicate from one seed."""
