"""Shoal over a real Slurm and a real Ray beside what those do by themselves, in one run."""
