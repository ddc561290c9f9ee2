"""Torch's operations in portable arithmetic: equal bits on every CPU, for any model and loss."""
