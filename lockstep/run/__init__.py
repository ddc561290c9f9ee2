"""The files of a run: its folder, ledger, checkpoints and metrics."""
