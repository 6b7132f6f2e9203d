"""The parts of a device worker process, wired: the main thread does all device work, a second one only reads."""

import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import resolve_model
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine
from opentinker_server.training.trainer import Trainer, TrainerConfig
from opentinker_server.workers.codec import encode_ready
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.errors import DeviceFault, make_error_info
from opentinker_server.workers.frames import encode_frame, receive_frame
from opentinker_server.workers.loop import Inbox, WorkerLoop
from opentinker_server.workers.v1 import worker_pb2

log = logging.getLogger(__name__)

EXIT_START_FAILED = 2
EXIT_DEVICE_FAULT = 3
EXIT_ORPHANED = 4

_ORPHAN_GRACE_S = 5.0
"""How long the running unit may still take once the control plane has gone."""


def serve(connection: socket.socket, config: WorkerConfig) -> int:
    """Loads the model, says so, and carries out commands until asked to end or the connection ends.

    Returns the exit code: 0, EXIT_START_FAILED (the reply to command 0 says why) or EXIT_DEVICE_FAULT.
    """
    inbox = Inbox()
    sending = threading.Lock()

    def send(reply: worker_pb2.WorkerReply) -> None:
        frame = encode_frame(reply.SerializeToString())
        try:
            with sending:
                connection.sendall(frame)
        except OSError:
            inbox.put(None)

    signal.signal(signal.SIGTERM, lambda *_: inbox.put(None))
    threading.Thread(target=_read_commands, args=(connection, inbox, send), daemon=True).start()
    try:
        loop = _load(config, inbox=inbox, send=send)
    except Exception as error:
        message = f"The device worker cannot start with model {config.model!r} on {config.device!r}: {error}"
        # A ValueError is meant for the user and says all.
        log.error("%s", message, exc_info=None if isinstance(error, ValueError) else error)
        send(worker_pb2.WorkerReply(final=True, error=make_error_info("FAILED_PRECONDITION", message)))
        return EXIT_START_FAILED
    send(worker_pb2.WorkerReply(final=True, ready=encode_ready(loop.model_info)))
    try:
        loop.run()
    except DeviceFault:
        log.exception("the device failed")
        return EXIT_DEVICE_FAULT
    return 0


def _load(config: WorkerConfig, *, inbox: Inbox, send: Callable[[worker_pb2.WorkerReply], None]) -> WorkerLoop:
    if config.threads:
        torch.set_num_threads(config.threads)
    source = resolve_model(config.model, cache_dir=Path(config.cache_dir).expanduser(), name=config.model_name or None)
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()
    base = BaseModel.load(
        source, dtype=getattr(torch, config.dtype), device=config.device, quantization=config.quantization
    )
    log.info("loaded %s on %s in %.1f s", base.info.name, config.device, time.monotonic() - started)
    trainer = Trainer(base, TrainerConfig(**dataclasses.asdict(config.trainer)))
    log.info("%s", trainer.memory)
    return WorkerLoop(
        base=base,
        trainer=trainer,
        sampler=SamplerEngine(base, EngineConfig(**dataclasses.asdict(config.engine))),
        config=config,
        inbox=inbox,
        send=send,
    )


def _read_commands(connection: socket.socket, inbox: Inbox, send: Callable[[worker_pb2.WorkerReply], None]) -> None:
    """Until the control plane has gone; then the process ends, even in the middle of a long unit."""
    while (payload := receive_frame(connection)) is not None:
        command = worker_pb2.WorkerCommand.FromString(payload)
        if command.HasField("ping"):
            send(worker_pb2.WorkerReply(command_id=command.command_id, final=True, done=worker_pb2.Done()))
        else:
            inbox.put(command)
    inbox.put(None)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(EXIT_ORPHANED)
