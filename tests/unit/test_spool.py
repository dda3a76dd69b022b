"""The audit spool and file: order, bounds, crashes, many processes."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from auth.audit_file import RotatingFile
from auth.spool import Segment, Spool, SpoolFull, hold, hold_own, orphans

MAX_BYTES = 400


class SpoolMachine(RuleBasedStateMachine):
    """Whatever happens (crashes too), what was appended and not delivered is there, in order, once."""

    segments = Bundle("segments")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.time = 0.0
        self.count = 0
        self.waiting: list[bytes] = []
        self.taken: list[Segment] = []
        self.spool = self._opened()

    def _opened(self) -> Spool:
        return Spool(self.folder, 60, MAX_BYTES, seal_after_s=1, clock=lambda: self.time)

    @rule(length=strategies.integers(1, 40), lines=strategies.integers(1, 4))
    def append(self, length: int, lines: int) -> None:
        new = [b"%d:%b\n" % (self.count + n, b"x" * length) for n in range(lines)]
        fits = self.spool.num_bytes + len(b"".join(new)) <= MAX_BYTES
        try:
            self.spool.append(new)
        except SpoolFull:
            assert not fits
            return
        assert fits
        self.count += lines
        self.waiting += new

    @rule(target=segments, seconds=strategies.sampled_from([0.0, 0.4, 2.0]), at_once=strategies.booleans())
    def take(self, seconds: float, at_once: bool) -> Segment | None:
        self.time += seconds
        segment = self.spool.take(at_once=at_once)
        if segment is not None:
            self.taken.append(segment)
            assert segment.path.read_bytes().endswith(b"\n")
        elif at_once:
            assert len(self.waiting) == sum(len(self._lines(old)) for old in self.taken)
        return segment

    @rule(segment=consumes(segments))
    def deliver(self, segment: Segment | None) -> None:
        if segment in self.taken:
            for line in self._lines(segment):
                self.waiting.remove(line)
            self.taken.remove(segment)
            self.spool.done(segment)

    @rule()
    def give_back(self) -> None:
        self.spool.give_back(self.taken)
        self.taken = []

    @rule()
    def crash(self) -> None:
        """The next process opens what the last one left."""
        self.spool = self._opened()
        self.taken = []

    @rule()
    def die_while_writing(self) -> None:
        """A torn last line is what no `append` has confirmed: it goes, and nothing else."""
        for path in self.folder.glob("*.open"):
            with path.open("ab") as file:
                file.write(b"to")
        self.crash()

    @rule()
    def adopt(self) -> None:
        """Another process's folder: its lines come last."""
        with tempfile.TemporaryDirectory() as folder:
            other = Spool(Path(folder), 60, MAX_BYTES)
            lines = [b"%d:other\n" % (self.count + n) for n in range(3)]
            self.count += 3
            other.append(lines)
            self.spool.adopt(Path(folder))
            self.waiting += lines
            assert not list(Path(folder).iterdir())

    @invariant()
    def all_is_there_in_order(self) -> None:
        files = sorted(self.folder.iterdir(), key=lambda path: path.stem)
        on_disk = [line for path in files for line in path.read_bytes().splitlines(keepends=True)]
        assert on_disk == self.waiting
        assert self.spool.num_bytes == len(b"".join(self.waiting))

    @staticmethod
    def _lines(segment: Segment) -> list[bytes]:
        return segment.path.read_bytes().splitlines(keepends=True)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_given_back_segments_come_first_and_in_order(tmp_path: Path) -> None:
    """Replay keeps the order of writing."""
    spool = Spool(tmp_path, 1, 10**6)
    for number in range(5):
        spool.append([b"%d\n" % number])
    taken = [segment for _ in range(3) if (segment := spool.take())]
    spool.done(taken[1])
    spool.give_back([taken[2], taken[0]])
    rest = []
    while segment := spool.take():
        rest.append(segment.path.read_bytes())
    assert rest == [b"0\n", b"2\n", b"3\n", b"4\n"]


def _append_until_killed(folder: Path, report: "multiprocessing.connection.Connection") -> None:
    spool = Spool(folder, 4096, 10**9)
    for number in range(10**9):
        spool.append([b"%d\n" % number])
        report.send(number)


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    """All that was appended before the kill is taken up by the next process, in order and whole."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_append_until_killed, args=(tmp_path, theirs))
    process.start()
    while ours.recv() < 3000:
        pass
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    last = 3000
    while ours.poll():
        last = ours.recv()
    spool = Spool(tmp_path, 4096, 10**9)
    numbers = []
    while segment := spool.take():
        numbers += [int(line) for line in segment.path.read_bytes().splitlines()]
        spool.done(segment)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > last
    assert not list(tmp_path.iterdir())


def test_one_process_holds_a_folder(tmp_path: Path) -> None:
    """Two servers on one state folder do not share a spool; what nobody holds can be adopted."""
    first, handle = hold_own(tmp_path, "worker-1")
    second, other = hold_own(tmp_path, "worker-1")
    assert (first.name, second.name) == ("worker-1", "worker-1.2")
    assert hold(first) is None
    assert list(orphans(tmp_path)) == []
    os.close(other)
    assert [folder.name for folder in orphans(tmp_path)] == ["worker-1.2"]
    os.close(handle)
    assert hold_own(tmp_path, "worker-1")[0] == first


def _write_lines(path: Path, number: int) -> None:
    file = RotatingFile(path, 4_000, keep=1000)
    for count in range(300):
        file.write(b'{"writer": %d, "n": %d}\n' % (number, count))


def test_processes_share_a_rotating_file(tmp_path: Path) -> None:
    """No line is lost or torn, whoever rotates; each writer's lines stay in order."""
    path = tmp_path / "made" / "audit.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_lines, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rotated = sorted(path.parent.glob("audit.jsonl.[0-9]*"), key=lambda file: -int(file.suffix[1:]))
    assert len(rotated) > 5
    lines = [json.loads(line) for file in [*rotated, path] for line in file.read_bytes().splitlines()]
    for number in range(4):
        assert [line["n"] for line in lines if line["writer"] == number] == list(range(300))
    assert all(file.stat().st_size <= 4_000 for file in rotated)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_rotation_keeps_so_many_files(tmp_path: Path) -> None:
    """The oldest go."""
    file = RotatingFile(tmp_path / "a", 10, keep=2)
    for number in range(6):
        file.write(b"line %d\n" % number)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("a*") if path.stat().st_size} == {
        "a": b"line 5\n",
        "a.1": b"line 4\n",
        "a.2": b"line 3\n",
    }


def test_a_file_moved_by_others_is_followed(tmp_path: Path) -> None:
    """As logrotate does it."""
    path = tmp_path / "a"
    file = RotatingFile(path, 10**6, keep=1)
    file.write(b"1\n")
    path.rename(tmp_path / "moved")
    file.write(b"2\n")
    path.unlink()
    file.write(b"3\n")
    assert (tmp_path / "moved").read_bytes() == b"1\n"
    assert path.read_bytes() == b"3\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could be written of the data is taken back."""
    path = tmp_path / "a"
    file, spool = RotatingFile(path, 10**6, keep=1), Spool(tmp_path / "spool", 100, 10**6)
    file.write(b"1\n")
    spool.append([b"1\n"])
    write = os.write
    left = [3]

    def full(handle: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] = 0
        return write(handle, bytes(data[:3]))

    monkeypatch.setattr(os, "write", full)
    for attempt in (lambda: file.write(b"22222\n"), lambda: spool.append([b"22222\n"])):
        left[0] = 3
        with pytest.raises(OSError, match="No space"):
            attempt()
    monkeypatch.undo()
    file.write(b"3\n")
    spool.append([b"3\n"])
    assert path.read_bytes() == b"1\n3\n"
    segment = spool.take(at_once=True)
    assert segment is not None
    assert segment.path.read_bytes() == b"1\n3\n"
    assert spool.num_bytes == 4
