"""Measurements, one command each. A table compares numbers of one run on one machine: only ratios travel."""
