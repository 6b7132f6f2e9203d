"""OpenTinker's client: drive training and sampling on a server from your own loop.

    import opentinker_client as ot

    service = ot.ServiceClient(base_url="127.0.0.1:8711")
    trainer = service.create_lora_training_client(base_model="smollm2-135m-instruct", rank=16).result()

Every call returns an `APIFuture`: `.result()` blocks, `await` does not. A script written for the public Tinker SDK runs
with `import opentinker_client as tinker`.
"""

from opentinker_client import types
from opentinker_client.exceptions import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    FailedPreconditionError,
    InternalServerError,
    NonFiniteGradientError,
    NotFoundError,
    OpenTinkerError,
    PermissionDeniedError,
    RateLimitError,
    RequestCancelledError,
    RequestFailedError,
    SessionExpiredError,
    StateLostError,
    TinkerError,
    UnprocessableEntityError,
)
from opentinker_client.futures import APIFuture
from opentinker_client.registry_client import RegistryClient, RestClient
from opentinker_client.sampling_client import SamplingClient
from opentinker_client.service_client import ServiceClient
from opentinker_client.training_client import TrainingClient
from opentinker_client.transport.connection import ForkedProcessError
from opentinker_client.types import (
    AdamParams,
    Checkpoint,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    Snapshot,
    TensorData,
    TrainingRun,
)

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIStatusError",
    "APITimeoutError",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "Checkpoint",
    "ConflictError",
    "Datum",
    "EncodedTextChunk",
    "FailedPreconditionError",
    "ForkedProcessError",
    "ForwardBackwardOutput",
    "ImageChunk",
    "InternalServerError",
    "LoraConfig",
    "ModelInput",
    "NonFiniteGradientError",
    "NotFoundError",
    "OpenTinkerError",
    "OptimStepResponse",
    "PermissionDeniedError",
    "RateLimitError",
    "RegistryClient",
    "RequestCancelledError",
    "RequestFailedError",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "SessionExpiredError",
    "Snapshot",
    "StateLostError",
    "TensorData",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "types",
]
