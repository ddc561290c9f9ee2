"""Environments with several agents, and opponents that play some of them."""
