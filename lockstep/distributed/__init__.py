"""How processes compute together: groups, shared memory, channels, and the tree that sums over shards."""
