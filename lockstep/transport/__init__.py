"""Brings rollouts to learners and versions to collectors: by calls, in shared memory, or in messages."""
