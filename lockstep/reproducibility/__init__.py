"""Proofs that runs are what they claim: verify, diff and replay."""
