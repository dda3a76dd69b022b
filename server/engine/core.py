"""The engine core process: vLLM's own, or the stub's. Starts it, watches it, ends it.

The core is started apart from its client (`AsyncLLM`), in the way vLLM does it for several API servers
(`run_multi_api_server` in vllm/entrypoints/cli/serve.py): the client binds its sockets, the core connects.
"""

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from server.config import Settings


class EngineStartError(Exception):
    """The engine core ended, or did not get ready in time. The message is one line."""


class EngineCore:
    """Owner of the core process. `start` blocks; everything else returns at once unless said otherwise."""

    def __init__(self, settings: Settings, config: Any) -> None:
        self._settings = settings
        self._config = config
        self._manager: Any = None
        self._processes: list[Any] = []
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the core (one for each data-parallel rank)."""
        return [process.pid for process in self._processes]

    def start(self, num_slots: int) -> list[dict[str, Any]]:
        """Starts the core and waits until it is ready; returns the addresses that each client has to bind.

        The core greets each of `num_slots` clients once, whenever it comes: a slot that was used is spent.
        Raises EngineStartError.
        """
        from vllm.v1.engine.utils import EngineZmqAddresses, get_engine_zmq_bind_addresses

        bind = get_engine_zmq_bind_addresses(self._config, num_slots)
        addresses = EngineZmqAddresses(inputs=bind.inputs, outputs=bind.outputs)
        if self._settings.engine.kind == "stub":
            self._start_stub(addresses)
        else:
            self._start_vllm(addresses)
        return [
            {"input_address": inputs, "output_address": outputs}
            for inputs, outputs in zip(addresses.inputs, addresses.outputs, strict=True)
        ]

    def _start_stub(self, addresses: Any) -> None:
        from server.engine import stub

        # Forked like the workers, from the process that has imported everything.
        process = multiprocessing.get_context("forkserver").Process(
            target=stub.run,
            args=(addresses.inputs, addresses.outputs, self._settings.stub),
            name=stub.PROCESS_NAME,
            daemon=True,
        )
        process.start()
        self._processes = [process]

    def _start_vllm(self, addresses: Any) -> None:
        from vllm.v1.engine.utils import launch_core_engines
        from vllm.v1.executor import Executor

        try:
            executor = Executor.get_class(self._config)
            with launch_core_engines(self._config, executor, True, addresses) as launch:
                self._manager = launch.engine_manager
                self._processes = list(self._manager.processes)
                if self._stopping:
                    raise RuntimeError("the server is shutting down")
        except (RuntimeError, OSError) as error:
            self.stop()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineStartError(f"the engine core did not start: {reason}") from error

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Calls `on_death(reason)` once, from a thread, when a core process ends without `stop`.

        A client of a core that it did not start itself is not told of the core's death (seen on 0.32.0:
        requests hang and `check_health` stays green), so this is the only sign.
        """

        def wait_for_end() -> None:
            wait([process.sentinel for process in self._processes])
            if not self._stopping:
                for process in self._processes:
                    process.join(0.1)  # takes note of the exit code
                codes = ", ".join(str(p.exitcode) for p in self._processes if p.exitcode is not None)
                on_death(f"the engine core ended by itself (exit code {codes or 'unknown'})")

        threading.Thread(target=wait_for_end, name="engine-core-watch", daemon=True).start()

    def kill(self) -> None:
        """Ends the core at once; also one that is stopped (SIGSTOP) or deaf. `watch` reports it."""
        for process in self._processes:
            process.kill()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the core; waits up to `timeout_s` seconds, then kills. Harmless when called again."""
        self._stopping = True
        if self._manager is not None:
            self._manager.shutdown(timeout=timeout_s)
            return
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
