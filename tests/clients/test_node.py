"""The official Node client of OpenAI and the demo model. Its packages are kept in the user's cache."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from server.demo_model import default_cache_dir
from tests.conftest import MODEL, Server

pytestmark = pytest.mark.engine

SUITE = Path(__file__).parent / "node"
INSTALL_LIMIT_S = 240


def _installed() -> Path:
    """The folder with the client's packages, installed once for each lock file."""
    lock = SUITE / "package-lock.json"
    folder = default_cache_dir() / f"node-client-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / "node_modules" / ".package-lock.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SUITE / name, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_LIMIT_S, capture_output=True)
    return folder


@pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None,
    reason="Node and npm are not installed; .ci/run installs them by apt",
)
def test_node_client(real: Server) -> None:
    """Every check of suite.mjs passes."""
    given = {
        "BASE_URL": f"{real.url}/v1",
        "API_KEY": real.key,
        "MODEL": MODEL,
        "CLIENT_FOLDER": str(_installed()),
    }
    command = ["node", str(SUITE / "suite.mjs")]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {json.loads(line)["passed"] for line in done.stdout.splitlines()}
    assert {"chat", "stream", "tools", "schema", "responses", "errors"} <= passed
