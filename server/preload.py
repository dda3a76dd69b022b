"""Imported once by the process that workers are forked from: what is here now is shared by all of them.

Frozen objects are left alone by the garbage collector, which would otherwise write to every page it visits
and so give each worker a copy of its own.
"""

import gc

import server.worker  # noqa: F401

gc.collect()
gc.freeze()
