from opentinker_client.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExportFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPORT_FORMAT_UNSPECIFIED: _ClassVar[ExportFormat]
    EXPORT_FORMAT_PEFT: _ClassVar[ExportFormat]
    EXPORT_FORMAT_MERGED: _ClassVar[ExportFormat]
EXPORT_FORMAT_UNSPECIFIED: ExportFormat
EXPORT_FORMAT_PEFT: ExportFormat
EXPORT_FORMAT_MERGED: ExportFormat

class Page(_message.Message):
    __slots__ = ("limit", "offset")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    limit: int
    offset: int
    def __init__(self, limit: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: Page
    def __init__(self, page: _Optional[_Union[Page, _Mapping]] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "total_count")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_policy_pb2.Adapter]
    total_count: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[_policy_pb2.Adapter, _Mapping]]] = ..., total_count: _Optional[int] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("adapter_id",)
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    def __init__(self, adapter_id: _Optional[str] = ...) -> None: ...

class GetAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _policy_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_policy_pb2.Adapter, _Mapping]] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("adapter_id", "page")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    page: Page
    def __init__(self, adapter_id: _Optional[str] = ..., page: _Optional[_Union[Page, _Mapping]] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "total_count")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[_policy_pb2.Snapshot]
    total_count: int
    def __init__(self, snapshots: _Optional[_Iterable[_Union[_policy_pb2.Snapshot, _Mapping]]] = ..., total_count: _Optional[int] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _policy_pb2.PolicyRef
    def __init__(self, policy: _Optional[_Union[_policy_pb2.PolicyRef, _Mapping]] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: _policy_pb2.Snapshot
    def __init__(self, snapshot: _Optional[_Union[_policy_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class WatchSnapshotsRequest(_message.Message):
    __slots__ = ("adapter_id", "after_version")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    after_version: int
    def __init__(self, adapter_id: _Optional[str] = ..., after_version: _Optional[int] = ...) -> None: ...

class WatchSnapshotsResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: _policy_pb2.Snapshot
    def __init__(self, snapshot: _Optional[_Union[_policy_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("adapter_id", "page")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    page: Page
    def __init__(self, adapter_id: _Optional[str] = ..., page: _Optional[_Union[Page, _Mapping]] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "total_count")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[_policy_pb2.Checkpoint]
    total_count: int
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[_policy_pb2.Checkpoint, _Mapping]]] = ..., total_count: _Optional[int] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _policy_pb2.Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[_policy_pb2.Checkpoint, _Mapping]] = ...) -> None: ...

class DeleteArtifactRequest(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class DeleteArtifactResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetTtlRequest(_message.Message):
    __slots__ = ("uri", "ttl_seconds")
    URI_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    uri: str
    ttl_seconds: int
    def __init__(self, uri: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class SetTtlResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("name", "data", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ExportArtifactRequest(_message.Message):
    __slots__ = ("uri", "format")
    URI_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    uri: str
    format: ExportFormat
    def __init__(self, uri: _Optional[str] = ..., format: _Optional[_Union[ExportFormat, str]] = ...) -> None: ...

class ExportArtifactResponse(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: FilePart
    def __init__(self, part: _Optional[_Union[FilePart, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("base_model",)
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    def __init__(self, base_model: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: FilePart
    def __init__(self, part: _Optional[_Union[FilePart, _Mapping]] = ...) -> None: ...
