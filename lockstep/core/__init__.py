"""What every part computes with: arrays, random streams, shards, the schedule, rollouts and digests."""
