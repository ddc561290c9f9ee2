"""Buffers of what was collected: rollouts, replay, and the batches that are learned from."""
