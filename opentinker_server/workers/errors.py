"""What a failure inside the worker means to whoever sent the command."""

import errno

import torch

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.sampler.base import SamplingError
from opentinker_server.training.errors import TrainingError
from opentinker_server.workers.codec import encode_error

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class DeviceFault(Exception):
    """The device can no longer be used from this process; only a new process can go on."""


def is_expected(error: Exception) -> bool:
    """Whether the error is an answer to the caller rather than a fault of the worker."""
    return isinstance(error, TrainingError | SamplingError)


def is_device_fault(error: Exception) -> bool:
    """Whether every later call on the device would fail, or could compute nonsense.

    Such as an illegal address or a failed assertion in a CUDA kernel; running out of memory is none.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )


def is_out_of_memory(error: Exception) -> bool:
    """Of the host or the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def to_error_info(error: Exception) -> error_pb2.ErrorInfo:
    """The answer to the command that raised `error`; nothing of the command was applied."""
    if isinstance(error, TrainingError | SamplingError):
        return encode_error(error)
    if is_out_of_memory(error):
        return make_error_info(
            "LIMIT_EXCEEDED",
            "The worker ran out of memory and nothing was applied: send shorter or fewer examples, or lower the "
            "worker's limits.",
        )
    if is_device_fault(error):
        return make_error_info("UNAVAILABLE", "The worker's device failed; the worker ends and is started anew.")
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return make_error_info("DISK_FULL", "No space is left on the server's disk; nothing was applied.")
    return make_error_info(
        "INTERNAL", f"Unexpected {type(error).__name__} in the device worker; its log has the traceback."
    )


def make_error_info(reason: str, message: str) -> error_pb2.ErrorInfo:
    """reason: the name of an ErrorReason without its prefix."""
    return error_pb2.ErrorInfo(reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message=message)
