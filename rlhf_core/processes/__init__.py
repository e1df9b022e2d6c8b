"""Start, guard and identify child processes.

Each child process ends with the process that started it, however that one ends. Three guards serve three kinds:

- `parent_death_guard`, started by `guarded.guarded_process`: any command. A watcher in its process group kills the group when
  the parent is gone; the command keeps its own process id, streams and exit status.
- `child.start_guard`: our own Python workers that run user code. The guard is the parent and subreaper of the worker,
  so it also finds and kills processes that the worker moved to other sessions.
- `pipelines.services.parent_death_guard`: servers. The guard sends SIGTERM, waits, and then kills.
"""
