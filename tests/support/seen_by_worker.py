"""A worker that prints the state of its process, and ends with the status, or waits for the end of its input."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import rlhf_core.processes.warm  # noqa: F401  # as the modules that the warm parent itself needs, so that both have the same

INHERITED = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Uid", "Groups")

if __name__ == "__main__":
    main = sys.modules["__main__"]
    seen = {
        "path": sys.path,
        # The parent calls sysconfig.
        "modules": sorted(name for name in sys.modules if not name.startswith("_sysconfigdata")),
        "flags": str(sys.flags),
        "arguments": (sys.argv, sys.orig_argv),
        "command": Path("/proc/self/cmdline").read_text(encoding="utf-8").rstrip("\0"),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "status": [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(INHERITED)],
        "limits": Path("/proc/self/limits").read_text(encoding="utf-8"),
        "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "streams": [
            (stream.encoding, stream.errors, stream.line_buffering) for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
        "threads": [thread.name for thread in threading.enumerate()],
        "main": sorted(vars(main)),
        "zone": time.tzname,
    }
    sys.stdout.write(f"{json.dumps(seen)}\n")
    sys.stdout.flush()
    ending = sys.argv[1] if len(sys.argv) > 1 else "0"
    if ending == "wait":
        sys.stdin.read()
    elif int(ending) < 0:
        os.kill(os.getpid(), -int(ending))
    else:
        sys.exit(int(ending))
