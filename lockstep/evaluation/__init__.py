"""What a policy is worth: scores, statistics, pictures and reports."""
