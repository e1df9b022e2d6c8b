"""Episodes of environments and agent programs, which run in child processes, and their drivers."""
