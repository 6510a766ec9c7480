"""Published numbers, and Shoal's beside them: one file for each table, all run by `make yardsticks`."""
