"""Real processes killed at random under load: nothing is lost, runs twice or is left behind."""
