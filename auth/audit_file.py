"""A file of lines that several processes write and any of them rotates."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class RotatingFile:
    """Appends whole lines to `path`; a file that would grow over `max_bytes` becomes `path.1`, and so on.

    A lock file beside it makes writes and rotation one step for all processes on this host, so no line is
    torn, and what a full disk left half-written is taken back. Files are made with mode 0600, their folder
    with 0700. All methods block, and raise OSError.
    """

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep`: how many rotated files stay beside the current one."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._lock = _open(path.with_name(path.name + ".lock"))
        self._file = _open(path)

    def write(self, data: bytes) -> None:
        """Appends `data`, all of it or nothing."""
        with self._locked():
            self._follow()
            size = os.fstat(self._file).st_size
            if size and size + len(data) > self._max_bytes:
                self._rotate()
                size = 0
            append_all(self._file, data, size)

    def close(self) -> None:
        """Closes; nothing is buffered."""
        os.close(self._file)
        os.close(self._lock)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _follow(self) -> None:
        """Another process (or logrotate) may have put a new file in place of ours."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        mine = os.fstat(self._file)
        if found is None or (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
            self._reopen()

    def _rotate(self) -> None:
        for number in range(self._keep, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number - 1), self._numbered(number))
        os.replace(self._path, self._numbered(1))
        self._reopen()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _reopen(self) -> None:
        fresh = _open(self._path)
        os.close(self._file)
        self._file = fresh


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def append_all(file: int, data: bytes, size: int) -> None:
    """Writes all of `data`; on an error the file is as before (`size` bytes)."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise
