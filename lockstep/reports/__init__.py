"""Shows finished and unfinished runs: plots, reports and comparisons of methods."""
