from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("epoch", "durable", "side", "artifacts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    durable: bool
    side: str
    artifacts: bool
    def __init__(self, epoch: _Optional[str] = ..., durable: _Optional[bool] = ..., side: _Optional[str] = ..., artifacts: _Optional[bool] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("message_id", "from_zone", "to_zone", "produced_at_unix_ms", "correlation_id", "causation_id", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    TO_ZONE_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSATION_ID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    correlation_id: str
    causation_id: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, message_id: _Optional[str] = ..., from_zone: _Optional[str] = ..., to_zone: _Optional[str] = ..., produced_at_unix_ms: _Optional[int] = ..., correlation_id: _Optional[str] = ..., causation_id: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("subject", "predicate", "object_json")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PREDICATE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_JSON_FIELD_NUMBER: _ClassVar[int]
    subject: str
    predicate: str
    object_json: str
    def __init__(self, subject: _Optional[str] = ..., predicate: _Optional[str] = ..., object_json: _Optional[str] = ...) -> None: ...

class Appending(_message.Message):
    __slots__ = ("envelope", "fact")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    FACT_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    fact: Fact
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., fact: _Optional[_Union[Fact, _Mapping]] = ...) -> None: ...

class Confirmation(_message.Message):
    __slots__ = ("message_id", "offset", "epoch", "digest", "buffer", "duplicate")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    offset: int
    epoch: str
    digest: str
    buffer: str
    duplicate: bool
    def __init__(self, message_id: _Optional[str] = ..., offset: _Optional[int] = ..., epoch: _Optional[str] = ..., digest: _Optional[str] = ..., buffer: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("message_ids", "from_zones", "to_zones", "produced_at_unix_ms", "subjects", "predicates", "objects_json", "correlation_ids", "causation_ids", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Labels
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Labels, _Mapping]] = ...) -> None: ...
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONES_FIELD_NUMBER: _ClassVar[int]
    TO_ZONES_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    PREDICATES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_JSON_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_IDS_FIELD_NUMBER: _ClassVar[int]
    CAUSATION_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    from_zones: _containers.RepeatedScalarFieldContainer[str]
    to_zones: _containers.RepeatedScalarFieldContainer[str]
    produced_at_unix_ms: _containers.RepeatedScalarFieldContainer[int]
    subjects: _containers.RepeatedScalarFieldContainer[str]
    predicates: _containers.RepeatedScalarFieldContainer[str]
    objects_json: _containers.RepeatedScalarFieldContainer[str]
    correlation_ids: _containers.RepeatedScalarFieldContainer[str]
    causation_ids: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.MessageMap[int, Labels]
    def __init__(self, message_ids: _Optional[_Iterable[str]] = ..., from_zones: _Optional[_Iterable[str]] = ..., to_zones: _Optional[_Iterable[str]] = ..., produced_at_unix_ms: _Optional[_Iterable[int]] = ..., subjects: _Optional[_Iterable[str]] = ..., predicates: _Optional[_Iterable[str]] = ..., objects_json: _Optional[_Iterable[str]] = ..., correlation_ids: _Optional[_Iterable[str]] = ..., causation_ids: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[int, Labels]] = ...) -> None: ...

class Labels(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AppendFactsRequest(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ...) -> None: ...

class Appended(_message.Message):
    __slots__ = ("confirmation", "fault")
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    confirmation: Confirmation
    fault: Fault
    def __init__(self, confirmation: _Optional[_Union[Confirmation, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class AppendFactsAnswer(_message.Message):
    __slots__ = ("offsets", "digests", "epoch", "buffer", "others")
    class OthersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Appended
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Appended, _Mapping]] = ...) -> None: ...
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    epoch: str
    buffer: str
    others: _containers.MessageMap[int, Appended]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[str]] = ..., epoch: _Optional[str] = ..., buffer: _Optional[str] = ..., others: _Optional[_Mapping[int, Appended]] = ...) -> None: ...

class GetFactRequest(_message.Message):
    __slots__ = ("from_zone", "message_id")
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    from_zone: str
    message_id: str
    def __init__(self, from_zone: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class GetFactAnswer(_message.Message):
    __slots__ = ("confirmation",)
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    confirmation: Confirmation
    def __init__(self, confirmation: _Optional[_Union[Confirmation, _Mapping]] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("from_zone", "to_zone")
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    TO_ZONE_FIELD_NUMBER: _ClassVar[int]
    from_zone: str
    to_zone: str
    def __init__(self, from_zone: _Optional[str] = ..., to_zone: _Optional[str] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("epoch", "offset")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    offset: int
    def __init__(self, epoch: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchFactsRequest(_message.Message):
    __slots__ = ("reader", "pair", "limit", "after")
    READER_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    reader: str
    pair: Pair
    limit: int
    after: Cursor
    def __init__(self, reader: _Optional[str] = ..., pair: _Optional[_Union[Pair, _Mapping]] = ..., limit: _Optional[int] = ..., after: _Optional[_Union[Cursor, _Mapping]] = ...) -> None: ...

class FetchFactsAnswer(_message.Message):
    __slots__ = ("facts", "digests", "offsets", "stored_at_unix_ms", "epochs")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    digests: _containers.RepeatedScalarFieldContainer[str]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    stored_at_unix_ms: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ..., digests: _Optional[_Iterable[str]] = ..., offsets: _Optional[_Iterable[int]] = ..., stored_at_unix_ms: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfirmReceiptRequest(_message.Message):
    __slots__ = ("reader", "pair", "cursor")
    READER_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    reader: str
    pair: Pair
    cursor: Cursor
    def __init__(self, reader: _Optional[str] = ..., pair: _Optional[_Union[Pair, _Mapping]] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ...) -> None: ...

class ConfirmReceiptAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CursorOfRequest(_message.Message):
    __slots__ = ("reader", "pair")
    READER_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    reader: str
    pair: Pair
    def __init__(self, reader: _Optional[str] = ..., pair: _Optional[_Union[Pair, _Mapping]] = ...) -> None: ...

class EndOfRequest(_message.Message):
    __slots__ = ("pair",)
    PAIR_FIELD_NUMBER: _ClassVar[int]
    pair: Pair
    def __init__(self, pair: _Optional[_Union[Pair, _Mapping]] = ...) -> None: ...

class CursorAtRequest(_message.Message):
    __slots__ = ("pair", "unix_ms")
    PAIR_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    pair: Pair
    unix_ms: int
    def __init__(self, pair: _Optional[_Union[Pair, _Mapping]] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class CursorAnswer(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: Cursor
    def __init__(self, cursor: _Optional[_Union[Cursor, _Mapping]] = ...) -> None: ...

class RetireReaderRequest(_message.Message):
    __slots__ = ("reader", "pair", "by")
    READER_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    reader: str
    pair: Pair
    by: str
    def __init__(self, reader: _Optional[str] = ..., pair: _Optional[_Union[Pair, _Mapping]] = ..., by: _Optional[str] = ...) -> None: ...

class RetireReaderAnswer(_message.Message):
    __slots__ = ("retired",)
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    retired: bool
    def __init__(self, retired: _Optional[bool] = ...) -> None: ...

class SurveyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Behind(_message.Message):
    __slots__ = ("offset", "facts", "bytes", "since_unix_ms")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    facts: int
    bytes: int
    since_unix_ms: int
    def __init__(self, offset: _Optional[int] = ..., facts: _Optional[int] = ..., bytes: _Optional[int] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class LogState(_message.Message):
    __slots__ = ("pair", "buffer", "epoch", "first", "last", "bytes", "readers")
    class ReadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Behind
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Behind, _Mapping]] = ...) -> None: ...
    PAIR_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    pair: Pair
    buffer: str
    epoch: str
    first: int
    last: int
    bytes: int
    readers: _containers.MessageMap[str, Behind]
    def __init__(self, pair: _Optional[_Union[Pair, _Mapping]] = ..., buffer: _Optional[str] = ..., epoch: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., bytes: _Optional[int] = ..., readers: _Optional[_Mapping[str, Behind]] = ...) -> None: ...

class SurveyAnswer(_message.Message):
    __slots__ = ("logs",)
    LOGS_FIELD_NUMBER: _ClassVar[int]
    logs: _containers.RepeatedCompositeFieldContainer[LogState]
    def __init__(self, logs: _Optional[_Iterable[_Union[LogState, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ring(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stored(_message.Message):
    __slots__ = ("digest", "size")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class PutObjectHeader(_message.Message):
    __slots__ = ("bucket", "key", "expected", "begin", "zone")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    expected: Stored
    begin: int
    zone: str
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., expected: _Optional[_Union[Stored, _Mapping]] = ..., begin: _Optional[int] = ..., zone: _Optional[str] = ...) -> None: ...

class PutObjectEnd(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class PutObjectRequest(_message.Message):
    __slots__ = ("header", "piece", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: PutObjectHeader
    piece: bytes
    end: PutObjectEnd
    def __init__(self, header: _Optional[_Union[PutObjectHeader, _Mapping]] = ..., piece: _Optional[bytes] = ..., end: _Optional[_Union[PutObjectEnd, _Mapping]] = ...) -> None: ...

class PutObjectAnswer(_message.Message):
    __slots__ = ("stored", "fault")
    STORED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    stored: Stored
    fault: Fault
    def __init__(self, stored: _Optional[_Union[Stored, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class ReceivedRequest(_message.Message):
    __slots__ = ("bucket", "key", "expected", "zone")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    expected: Stored
    zone: str
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., expected: _Optional[_Union[Stored, _Mapping]] = ..., zone: _Optional[str] = ...) -> None: ...

class ReceivedAnswer(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class GetObjectRequest(_message.Message):
    __slots__ = ("bucket", "key", "begin", "zone")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    begin: int
    zone: str
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., begin: _Optional[int] = ..., zone: _Optional[str] = ...) -> None: ...

class GetObjectHeader(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: Stored
    def __init__(self, stored: _Optional[_Union[Stored, _Mapping]] = ...) -> None: ...

class GetObjectAnswer(_message.Message):
    __slots__ = ("header", "piece")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    header: GetObjectHeader
    piece: bytes
    def __init__(self, header: _Optional[_Union[GetObjectHeader, _Mapping]] = ..., piece: _Optional[bytes] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("kind", "message", "category", "retry_after", "final", "later", "code", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    category: str
    retry_after: float
    final: bool
    later: bool
    code: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., category: _Optional[str] = ..., retry_after: _Optional[float] = ..., final: _Optional[bool] = ..., later: _Optional[bool] = ..., code: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...
