"""Computation with several processes: groups, shared memory, channels, and the tree that sums over shards."""
