"""Buffers of collected data: rollouts, replay, and the batches that learners learn from."""
