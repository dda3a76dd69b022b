"""A PostgreSQL server of the tests' own: its own folder, a free loopback port, never as root."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from tests.conftest import free_port


def binaries() -> Path | None:
    """Folder of `initdb` and `pg_ctl`: on the PATH, or where Debian puts them."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class Postgres:
    """A running server; `url(name)` is a database of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._bin = binaries() or pytest.skip("no PostgreSQL; .ci/run installs it")

    def url(self, name: str) -> str:
        """SQLAlchemy's URL of a new empty database."""
        self.sql("postgres", f'CREATE DATABASE "{name}"')
        return f"postgresql+asyncpg://test@127.0.0.1:{self._port}/{name}"

    def sql(self, database: str, statement: str) -> None:
        """Runs one statement."""

        async def run() -> None:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=self._port, user="test", database=database
            )
            await connection.execute(statement)
            await connection.close()

        asyncio.run(run())

    def make(self) -> None:
        """Makes the cluster."""
        self._run(
            "initdb",
            "-D",
            str(self._folder / "data"),
            "-U",
            "test",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        )

    def start(self) -> None:
        """Starts it and waits until it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._ctl("start", "-w", "-o", options, "-l", str(self._folder / "log"))

    def stop(self) -> None:
        """Ends it at once, open connections too."""
        self._ctl("stop", "-m", "immediate")

    def _ctl(self, *args: str) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), *args)

    def _run(self, program: str, *args: str) -> str:
        command = [str(self._bin / program), *args]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        # To a file, not a pipe: the server that pg_ctl leaves behind would hold the pipe open.
        with tempfile.TemporaryFile("w+") as output:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, cwd="/", timeout=60, check=False
            ).returncode
            output.seek(0)
            text = output.read()
        assert code == 0, text
        return text.strip()


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="lapilli-pg-") as name:
        if os.geteuid() == 0:
            shutil.chown(name, "postgres", "postgres")
        server = Postgres(Path(name))
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()
