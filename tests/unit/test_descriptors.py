"""How many connections the server may hold."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from server import serve
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
serve._raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(256, 4096, 4096), (4096, 4096, 4096)])
def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(soft: int, hard: int, raised: int) -> None:
    """A shell's 1024 would be too few for 2000 idle connections."""
    script = SCRIPT.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(raised), str(hard)], done.stderr
