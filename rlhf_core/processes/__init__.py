"""Start, guard and identify child processes.

Each of our children ends with the process that started it, however that ends. There are three ways, for three kinds:

- `parent_death_guard`, started by `guarded.leashed`: any command. A watcher in its process group kills the group when the
  starter is gone; the command keeps its own process id, streams and status.
- `child.start_guard`: our own Python workers that run code of users. The guard is the parent and subreaper of the worker,
  so it also finds and kills what the worker moved to other sessions.
- `pipelines.services.parent_death_guard`: servers. The guard asks with SIGTERM, has patience, and then kills.
"""
