"""The foundations: arrays, random streams, shards, the schedule, rollouts and digests."""
