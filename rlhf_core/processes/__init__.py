"""Start, guard and identify child processes.

Each child process ends with the process that started it, however that one ends. `guard` serves commands and our own
workers: it kills at once, whatever they started. `pipelines.services.parent_death_guard` serves servers: it sends
SIGTERM, waits, and then kills their process group alone, as their clients' runs may be in other sessions.
"""
