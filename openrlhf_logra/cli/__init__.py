"""The command `openrlhf-logra`: main.py finds the subcommand, every other module here is one."""
