"""Real processes killed at random under mixed load: nothing accepted is lost, nothing runs twice, nothing is left."""
