"""Collectors: environments and a policy that fill rollouts."""
