"""Learning: from rollouts to gradients, and from gradients to the next version."""
