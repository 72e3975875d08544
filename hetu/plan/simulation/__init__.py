"""A step played on a clock, from each rank's instruction list."""
