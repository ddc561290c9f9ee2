"""Buffers of collected data: rollouts, replay, and the batches to learn from."""
