"""Torch's operations in portable arithmetic: identical bits on every CPU, for any model and loss."""
