"""install.sh, run with a PATH of stub commands: nothing is installed, nothing leaves the machine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM_COMMANDS = (
    *("bash", "basename", "cat", "cksum", "dirname", "env", "grep", "head", "rm", "sleep"),
    *("tail", "timeout", "tr"),
    # Of the stubs.
    *("chmod", "cp", "mkdir", "touch"),
)

# A Python as install.sh sees it. CALLS gets each call; one that matches FAIL_ON fails with FAIL_TEXT.
PYTHON_STUB = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
if [[ -n "${FAIL_ON:-}" && "$*" =~ $FAIL_ON && ! ( -n "${FAIL_UNTIL:-}" && -e "$FAIL_UNTIL" ) ]]; then
    echo "${FAIL_TEXT:-it broke}" >&2
    exit 1
fi
case "$*" in
--version) echo "Python 3.11.7" ;;
"-m venv"*)
    mkdir -p "${@: -1}/bin"
    cp "$0" "${@: -1}/bin/python"
    printf '#!/usr/bin/env bash\\necho "lapilli $*"\\nenv\\n' >"${@: -1}/bin/lapilli"
    chmod +x "${@: -1}/bin/lapilli"
    ;;
*uninstall*) touch "${FAIL_UNTIL:-/dev/null}" ;;
esac
"""


def write_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    """A checkout that holds only what install.sh reads, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "path"
        self.calls_file = folder / "calls"
        self.bin.mkdir()
        for name in ("install.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        for name in SYSTEM_COMMANDS:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)

    def add(self, name: str, text: str = PYTHON_STUB) -> None:
        """Put a stub command on the PATH."""
        write_command(self.bin / name, text)

    def run(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """install.sh with these flags."""
        self.calls_file.write_text("")
        return subprocess.run(
            [str(self.bin / "bash"), str(self.folder / "install.sh"), *flags],
            env={
                "PATH": str(self.bin),
                "CALLS": str(self.calls_file),
                "INSTALL_BACKOFF_S": "0",
                "HOME": str(self.folder),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self, part: str) -> list[str]:
        """Calls of Python that hold `part`."""
        return [line for line in self.calls_file.read_text().splitlines() if part in line]


@pytest.fixture
def bare(tmp_path):
    """No Python on the PATH."""
    return Checkout(tmp_path)


@pytest.fixture
def checkout(bare):
    """python3.11 on the PATH."""
    bare.add("python3.11")
    return bare


def assert_failed(result, step, *parts):
    assert result.returncode == 1
    first, second = result.stderr.splitlines()[-2:]
    assert first.startswith(f'install.sh: step "{step}" failed: ')
    assert second.startswith("What to do: ")
    for part in parts:
        assert part in first + second


def test_is_executable():
    assert os.access(ROOT / "install.sh", os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_help_names_every_flag_and_does_nothing(bare):
    result = bare.run("--help")
    assert result.returncode == 0
    flags = ("--model", "--tp-size", "--quantization", "--port", "--no-start", "--dev", "--engine-extra")
    for flag in (*flags, "--help"):
        assert flag in result.stdout
    assert not (bare.folder / ".venv").exists()


def test_no_python(bare):
    assert_failed(bare.run(), "virtual environment", "no Python 3.11 or newer", "apt install")


def test_python_that_does_not_start_or_is_too_old_is_passed_over(bare):
    bare.add("python3.11", "#!/usr/bin/env bash\necho 'pyenv: command not found' >&2; exit 127\n")
    bare.add("python3", "#!/usr/bin/env bash\nexit 1\n")
    assert_failed(bare.run(), "virtual environment", "no Python 3.11 or newer")
    bare.add("python3.13")
    assert bare.run("--no-start").returncode == 0


def test_missing_venv_module_names_the_package(checkout):
    result = checkout.run(FAIL_ON="import ensurepip")
    assert_failed(result, "virtual environment", "no venv module", "apt install python3.11-venv")


def test_full_run_installs_prepares_and_serves(checkout):
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    assert len(checkout.calls("pip install")) == 2
    assert checkout.calls("torch==2.13.0+cpu")
    assert checkout.calls(f"--editable {checkout.folder}[cpu]")
    assert all("constraints.txt" in call for call in checkout.calls("pip install"))
    assert checkout.calls("-m server.demo_model")
    assert "lapilli serve\n" in result.stdout
    assert "LAPILLI_" not in result.stdout


def test_second_run_installs_nothing(checkout):
    checkout.run("--no-start")
    result = checkout.run("--no-start")
    assert result.returncode == 0
    assert "already installed" in result.stdout
    assert not checkout.calls("pip install")
    assert not checkout.calls("-m venv")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_file_installs_again(checkout, name):
    checkout.run("--no-start")
    with (checkout.folder / name).open("a") as file:
        file.write("# changed\n")
    checkout.run("--no-start")
    assert checkout.calls("pip install")


def test_dev_is_installed_after_a_run_without(checkout):
    checkout.run("--no-start")
    checkout.run("--no-start", "--dev")
    assert checkout.calls("[cpu,dev]")
    checkout.run("--no-start")
    assert not checkout.calls("pip install")


def test_gpu_is_found_and_gets_its_own_environment(checkout):
    checkout.run("--no-start")
    checkout.add("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    result = checkout.run("--no-start")
    assert "engine: gpu" in result.stdout
    assert checkout.calls("-m venv")
    assert checkout.calls("[gpu]")
    assert not checkout.calls("torch==2.13.0+cpu")


def test_driver_without_gpu_and_forced_engine(checkout):
    checkout.add("nvidia-smi", "#!/usr/bin/env bash\necho 'No devices were found'; exit 6\n")
    assert "engine: cpu" in checkout.run("--no-start").stdout
    assert "engine: gpu" in checkout.run("--no-start", "--engine-extra", "gpu").stdout


def test_torch_comes_from_pytorch_where_plain_pip_has_none(checkout):
    # This stub fails the call that lacks PyTorch's index.
    checkout.add(
        "python3.11",
        PYTHON_STUB.replace(
            'case "$*" in',
            'if [[ "$*" == *torch==* && "$*" != *extra-index-url* ]]; then exit 1; fi\ncase "$*" in',
            1,
        ),
    )
    result = checkout.run("--no-start")
    assert result.returncode == 0
    assert [("extra-index-url" in call) for call in checkout.calls("torch==")] == [False, True]


def test_packages_are_tried_three_times(checkout):
    result = checkout.run(FAIL_ON="--editable")
    assert_failed(result, "packages", "lapilli[cpu]")
    assert len(checkout.calls("--editable")) == 3
    assert not (checkout.folder / ".venv" / ".lapilli-installed").exists()


def test_torchvision_that_does_not_fit_is_removed(checkout):
    result = checkout.run(
        "--no-start",
        FAIL_ON="AsyncLLM|import torchvision",
        FAIL_TEXT="RuntimeError: operator torchvision::nms does not exist",
        FAIL_UNTIL=str(checkout.folder / "removed"),
    )
    assert result.returncode == 0, result.stderr
    assert [call.split()[-1] for call in checkout.calls("uninstall")] == ["torchvision"]
    assert len(checkout.calls("AsyncLLM")) == 2


def test_engine_that_cannot_be_imported(checkout):
    result = checkout.run(FAIL_ON="AsyncLLM", FAIL_TEXT="OSError: libnuma.so.1: cannot open")
    assert_failed(result, "engine check", "libnuma.so.1", ".lapilli-install.log")
    assert not checkout.calls("uninstall")


def test_demo_model_that_cannot_be_prepared(checkout):
    result = checkout.run(FAIL_ON="server.demo_model", FAIL_TEXT="demo model: no network")
    assert_failed(result, "demo model", "--model")
    assert "demo model: no network" in result.stderr


def test_other_model_needs_no_demo_model(checkout):
    result = checkout.run("--model", "org/name")
    assert "lapilli serve --model org/name\n" in result.stdout
    assert not checkout.calls("server.demo_model")


def test_flags_reach_the_server_in_order(checkout):
    expected = "--tp-size 2 --quantization fp8 --port 9000 --engine stub --gateway.host 0.0.0.0"
    flags = expected.replace("--quantization fp8", "--quantization=fp8").split()
    assert f"lapilli serve {expected}\n" in checkout.run(*flags).stdout


@pytest.mark.parametrize(("flags", "part"), [(["--model"], "--model"), (["--engine-extra", "tpu"], "tpu")])
def test_bad_flags(checkout, flags, part):
    assert_failed(checkout.run(*flags), "read the flags", part)
    assert not (checkout.folder / ".venv").exists()
