"""The process that gateway workers are forked from: a fork of this one, made while it has no threads.

`multiprocessing`'s fork server starts as a fresh interpreter, which would import vLLM a second time: seconds
of CPU at each start, and some 450 MB that nobody shares. Workers can't be forked from the supervisor itself:
by the time that one has to be replaced, it has threads.
"""

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

import setproctitle

KEPT_FDS = (0, 1, 2)
PROCESS_NAME = "lapilli-forkserver"


def start_fork_server(module: str) -> None:
    """Imports `module`, with all that this process and the workers need, and starts the fork server."""
    importlib.import_module(module)
    # Frozen objects are left alone by the garbage collector, which would otherwise write to every page it
    # visits and so give each worker a copy of its own.
    gc.collect()
    gc.freeze()
    resource_tracker.ensure_running()  # the fork server would start it, by the call that stands in below
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(_path: bytes, _args: Sequence[Any], fds: Sequence[int]) -> int:
    """Stands in for `spawnv_passfds`: the child becomes the server, with these descriptors and no others."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        setproctitle.setproctitle(PROCESS_NAME)
        _close_all_but({*KEPT_FDS, *fds})
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # it was held at the fork
        listener_fd, alive_fd = fds
        forkserver.main(listener_fd, alive_fd, [])
    except SystemExit:
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is unwound here


def _close_all_but(kept: set[int]) -> None:
    """Others would hold ports and pipes open after the parent's end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # one was only there to list the folder
                os.close(int(name))
