"""How rollouts get to learners and versions to collectors: in one process, in shared memory, or in messages."""
