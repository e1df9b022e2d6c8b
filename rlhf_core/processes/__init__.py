"""Start, guard and identify child processes.

Each child process ends with the process that started it, however that process ends. `guard` serves commands and our
workers: it kills them and all their descendants at once. `pipelines.services.parent_death_guard` serves servers: it
sends SIGTERM, waits, and then kills only their process group, as their clients' runs may be in other sessions.
"""
