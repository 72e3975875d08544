"""From a strategy to one rank's graph: placing, cutting, buckets, stages and their schedule."""
