"""A real server in this process: control plane on a thread of its own, worker in its own process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from opentinker_server.app import Server
from opentinker_server.config import load_config


class RunningServer:
    """Starts on a free loopback port; `stop` ends it and its worker."""

    def __init__(self, model: Path | str, state_dir: Path, **settings: object):
        overrides = {
            "server.port": "0",
            "server.state_dir": str(state_dir),
            "model.name": str(model),
            "model.dtype": "float32",
            "model.threads": "2",
            **{key: str(value) for key, value in settings.items()},
        }
        self.state_dir = state_dir
        self._config = load_config(None, overrides=overrides)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server", daemon=True)
        self._thread.start()
        self._server = Server(self._config)
        self._run(self._server.start())
        self.address: str = self._server.address

    def _run(self, coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=120)

    def stop(self) -> None:
        """Graceful stop."""
        self._run(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
