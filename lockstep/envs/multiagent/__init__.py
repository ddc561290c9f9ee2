"""Environments with several agents, and the opponents that play some of them."""
