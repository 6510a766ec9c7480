"""What `shoal.runtime` costs a training step when nothing fails."""
