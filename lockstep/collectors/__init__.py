"""Collecting: environments and policy, filling rollouts."""
