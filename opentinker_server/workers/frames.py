"""Frames on the socket between control plane and worker: 4 bytes big-endian length, then that many bytes.

The first frame is the `WorkerConfig` as JSON; every later one is a serialized WorkerCommand, or WorkerReply the
other way. Free of torch.
"""

import asyncio
import socket
import struct

MAX_FRAME_BYTES = 2**31 - 1
"""The most that protobuf can serialize."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: bytes) -> bytes:
    """The frame of `payload`. Raises ValueError above MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next payload, or None at the end of the stream; the end inside a frame counts as the end too."""
    header = _receive_exactly(connection, _LENGTH.size)
    return None if header is None else _receive_exactly(connection, _LENGTH.unpack(header)[0])


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """As `receive_frame`, on an event loop."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            received = connection.recv_into(view)
        except ConnectionError:
            return None
        if received == 0:
            return None
        view = view[received:]
    return bytes(data)
