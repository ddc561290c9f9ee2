"""How rollouts reach learners and versions reach collectors: by a call, in shared memory, or in messages."""
