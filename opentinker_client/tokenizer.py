"""Tokenizers come from the server, so that clients need no hub."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from opentinker_client.exceptions import APIError
from opentinker_client.transport.connection import Connection
from opentinker_client.wire import requests

_PLAIN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def receive_files(parts: AsyncIterator[Any], directory: Path) -> list[Path]:
    """Writes streamed file parts into `directory`, each file complete and hash-checked.

    Raises APIError for a name that is not a plain file name, a size or hash that does not match, or a file that comes
    twice; nothing is written outside `directory`.
    """
    written: list[Path] = []
    current: _Incoming | None = None
    try:
        async for message in parts:
            part = message.part
            if current is None or part.name != current.path.name:
                if current is not None:
                    written.append(current.finish())
                if not _PLAIN_FILE.fullmatch(part.name) or any(path.name == part.name for path in written):
                    raise APIError(f"the server sent a file with the name {part.name!r}", reason="CORRUPT_DATA")
                directory.mkdir(parents=True, exist_ok=True)
                current = _Incoming(directory / part.name, part.size_bytes, part.sha256)
            current.add(part.data)
        if current is not None:
            written.append(current.finish())
    except BaseException:
        if current is not None:
            current.abandon()
        raise
    return written


class _Incoming:
    """One file on its way; it appears under its name only when it is complete."""

    def __init__(self, path: Path, size: int, sha256: str):
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file = self._partial.open("wb")
        self._digest = hashlib.sha256()
        self._size, self._sha256 = size, sha256

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def finish(self) -> Path:
        size = self._file.tell()
        self._file.close()
        if size != self._size or self._digest.hexdigest() != self._sha256:
            raise APIError(
                f"{self.path.name} arrived damaged: {size} of {self._size} bytes, or another sha256 than "
                f"{self._sha256}",
                reason="CORRUPT_DATA",
                field=self.path.name,
                expected=self._size,
                actual=size,
            )
        self._partial.replace(self.path)
        return self.path

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def load_tokenizer(connection: Connection, base_model: str) -> Any:
    """The tokenizer of a base model: transformers' when it is installed, else that of the `tokenizers` library.

    Raises ModuleNotFoundError naming the extra when neither is installed.
    """
    with tempfile.TemporaryDirectory(prefix="opentinker-tokenizer-") as folder:
        directory = Path(folder)
        request = requests.registry.GetTokenizerRequest(base_model=base_model)

        async def fetch() -> list[Path]:
            return await receive_files(connection.link.stream("registry", "GetTokenizer", request), directory)

        connection.submit(fetch()).result()
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError:
            pass
        else:
            return AutoTokenizer.from_pretrained(folder)
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "get_tokenizer needs transformers or tokenizers: pip install 'opentinker[cookbook]'"
            ) from None
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
