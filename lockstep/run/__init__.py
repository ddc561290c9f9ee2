"""What a run writes: its folder, ledger, checkpoints and metrics."""
