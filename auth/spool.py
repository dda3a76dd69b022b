"""Records on disk until a collector has them: a folder of segments, written and sent in order."""

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from auth.audit_file import FILE_MODE, FOLDER_MODE, append_all

SEALED = ".jsonl"
OPEN = ".open"


class SpoolFull(Exception):
    """No more may be kept: what was given was not taken."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A file of whole lines that is written no more."""

    path: Path
    num_bytes: int


class Spool:
    """Lines in segments of about `segment_bytes`, `max_bytes` in all.

    What is appended survives the process, `kill -9` too (not a power cut: nothing is synced). One process
    holds a folder at a time. Safe to use from several threads; methods block for the disk, and raise OSError.
    """

    def __init__(
        self,
        folder: Path,
        segment_bytes: int,
        max_bytes: int,
        *,
        seal_after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seal_after_s`: how long a segment that is not full waits for further lines."""
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._seal_after_s = seal_after_s
        self._clock = clock
        self._mutex = threading.Lock()
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        for torn in sorted(folder.glob(f"*{OPEN}")):
            _seal_torn(torn)
        self._ready = deque(segments_in(folder))
        self._taken: dict[Path, Segment] = {}
        self._next_number = 1 + max((_number(segment.path) for segment in self._ready), default=0)
        self._file: int | None = None
        self._open_path = folder
        self._open_bytes = 0
        self._opened_at = 0.0
        self._bytes = sum(segment.num_bytes for segment in self._ready)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk that are not delivered."""
        return self._bytes

    def append(self, lines: Sequence[bytes]) -> None:
        """Takes whole lines, each with its newline: all or, raising SpoolFull or OSError, none."""
        data = b"".join(lines)
        with self._mutex:
            if self._bytes + len(data) > self._max_bytes:
                raise SpoolFull
            if self._file is None:
                self._start_segment()
            assert self._file is not None
            append_all(self._file, data, self._open_bytes)
            self._open_bytes += len(data)
            self._bytes += len(data)
            if self._open_bytes >= self._segment_bytes:
                self._seal()

    def take(self, *, at_once: bool = False) -> Segment | None:
        """The oldest segment that nobody has taken, to be sent; None while there is nothing (or too little).

        `at_once`: a segment that could still wait for further lines too.
        """
        with self._mutex:
            late = at_once or self._clock() - self._opened_at >= self._seal_after_s
            if not self._ready and self._file is not None and late:
                self._seal()
            if not self._ready:
                return None
            segment = self._ready.popleft()
            self._taken[segment.path] = segment
            return segment

    def give_back(self, segments: Sequence[Segment]) -> None:
        """These were not delivered: they are the next to be taken, oldest first."""
        with self._mutex:
            for segment in sorted(segments, key=lambda segment: segment.path.name, reverse=True):
                del self._taken[segment.path]
                self._ready.appendleft(segment)

    def done(self, segment: Segment) -> None:
        """It was delivered, or is given up: it is deleted."""
        with self._mutex:
            segment.path.unlink(missing_ok=True)
            del self._taken[segment.path]
            self._bytes -= segment.num_bytes

    def adopt(self, folder: Path) -> int:
        """Moves the segments of another folder, which nobody may hold, to the end of this one; how many."""
        with self._mutex:
            if self._file is not None:
                self._seal()
            for torn in sorted(folder.glob(f"*{OPEN}")):
                _seal_torn(torn)
            found = segments_in(folder)
            for segment in found:
                target = self._path(SEALED)
                os.rename(segment.path, target)
                self._ready.append(Segment(target, segment.num_bytes))
                self._bytes += segment.num_bytes
            return len(found)

    def close(self) -> None:
        """Seals what is open; all stays on disk."""
        with self._mutex:
            if self._file is not None:
                self._seal()

    def _start_segment(self) -> None:
        self._open_path = self._path(OPEN)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._open_path, flags, FILE_MODE)
        self._open_bytes = 0
        self._opened_at = self._clock()

    def _path(self, suffix: str) -> Path:
        path = self.folder / f"{self._next_number:012d}{suffix}"
        self._next_number += 1
        return path

    def _seal(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = None
        sealed = self._open_path.with_suffix(SEALED)
        os.rename(self._open_path, sealed)
        self._ready.append(Segment(sealed, self._open_bytes))


def segments_in(folder: Path) -> list[Segment]:
    """The segments of a folder, oldest first; empty files are deleted."""
    found = []
    for path in sorted(folder.glob(f"*{SEALED}")):
        if size := path.stat().st_size:
            found.append(Segment(path, size))
        else:
            path.unlink()
    return found


def hold(folder: Path) -> int | None:
    """Holds a folder until the process ends or the result is closed (`os.close`); None: another has it."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def hold_own(root: Path, name: str) -> tuple[Path, int]:
    """A folder below `root` for the process called `name`, which another server's may be called too."""
    for number in range(1, 1000):
        folder = root / (name if number == 1 else f"{name}.{number}")
        if (handle := hold(folder)) is not None:
            return folder, handle
    raise OSError(f"all spool folders of {name} are in use")


def orphans(root: Path) -> Iterator[Path]:
    """Folders below `root` that no process holds; each is held while the caller looks at it."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if (handle := hold(folder)) is None:
            continue
        try:
            yield folder
        finally:
            os.close(handle)


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _seal_torn(path: Path) -> None:
    """What a process that died was writing: its whole lines are kept."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    os.rename(path, path.with_suffix(SEALED))
