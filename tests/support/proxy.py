"""A TCP proxy on loopback that cuts connections after the server has received a request."""

from __future__ import annotations

import asyncio
import threading


class CuttingProxy:
    """Forwards bytes; after `cut_next_response` the next answer is dropped and its connection closed."""

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._cuts = 0
        self.cut = 0
        """Connections cut so far."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut_next_response(self, times: int = 1) -> None:
        """Cut that many times, once per connection."""
        self._cuts = times

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        writers = (writer, server_writer)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, from_server: bool) -> None:
            while data := await source.read(65536):
                # Acknowledgements and settings are small; an answer to a call is not.
                if from_server and self._cuts > 0 and len(data) > 100:
                    self._cuts -= 1
                    self.cut += 1
                    break
                sink.write(data)
                await sink.drain()

        pumps = [
            asyncio.ensure_future(pump(reader, server_writer, from_server=False)),
            asyncio.ensure_future(pump(server_reader, writer, from_server=True)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for each in writers:
            each.close()

    def stop(self) -> None:
        """Stop listening and cut what is open."""

        async def close() -> None:
            self._server.close()
            current = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not current]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
