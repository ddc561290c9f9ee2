"""What runs a job where: processes, shared memory, pipes, Ray, checkpoints, and the display."""
