"""What a run writes, and what is made of it later: metrics, ledger, checkpoints, and what begins from those."""
