"""The command line. Each group of commands has one file."""
