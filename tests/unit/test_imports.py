"""What must not be imported before `serve` has prepared the environment."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "package",
    [
        "vllm",  # reads its environment when it is imported
        "prometheus_client",  # decides then whether figures go to files, which other processes can read
    ],
)
def test_serve_imports_it_later(package: str) -> None:
    code = f"import sys, server.cli, server.serve; sys.exit({package!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
