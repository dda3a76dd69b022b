"""Imported once by the process that workers are forked from: what is here now is shared by all of them.

Frozen objects are left alone by the garbage collector, which would otherwise write to every page it visits
and so give each worker a copy of its own.
"""

import gc
import logging

# Until a worker sets up its own logging, and even after the server has ended with a bad setting, imports here
# would print their warnings bare.
logging.getLogger().addHandler(logging.NullHandler())

import server.worker  # noqa: E402, F401

gc.collect()
gc.freeze()
