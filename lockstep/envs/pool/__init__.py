"""Child processes of a collector that step environments, so that Python environments use several cores.

Each process makes a shard of its block of the environments. Observations, actions, rewards and flags are exchanged
through shared memory. Pipes only carry short requests, their answers, and errors.
"""
