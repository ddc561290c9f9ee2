"""Learning: from rollouts to gradients, and from those to the next version."""
