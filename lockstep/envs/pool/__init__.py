"""Environments stepped by child processes of a collector, so that Python environments use several cores.

Each process makes a shard of its block of the environments. Observations, actions, rewards and flags travel through
shared memory; pipes carry only short requests, their answers, and errors.
"""
