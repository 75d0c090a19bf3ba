from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INTERNAL: _ClassVar[ErrorCode]
    BAD_REQUEST: _ClassVar[ErrorCode]
    WRONG_BLOCKS: _ClassVar[ErrorCode]
    TOO_LONG: _ClassVar[ErrorCode]
    BUSY: _ClassVar[ErrorCode]
    CACHE_FULL: _ClassVar[ErrorCode]
    EXPIRED: _ClassVar[ErrorCode]
    DRAINING: _ClassVar[ErrorCode]
    UNAUTHORIZED: _ClassVar[ErrorCode]
    NO_ADAPTER: _ClassVar[ErrorCode]
INTERNAL: ErrorCode
BAD_REQUEST: ErrorCode
WRONG_BLOCKS: ErrorCode
TOO_LONG: ErrorCode
BUSY: ErrorCode
CACHE_FULL: ErrorCode
EXPIRED: ErrorCode
DRAINING: ErrorCode
UNAUTHORIZED: ErrorCode
NO_ADAPTER: ErrorCode

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("model", "start", "end", "max_length", "rows", "bid", "adapter", "session_id", "codec", "prefix", "no_queue", "push_key", "request_id", "resumes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NO_QUEUE_FIELD_NUMBER: _ClassVar[int]
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    model: str
    start: int
    end: int
    max_length: int
    rows: int
    bid: float
    adapter: str
    session_id: bytes
    codec: str
    prefix: bytes
    no_queue: bool
    push_key: bytes
    request_id: str
    resumes: bool
    def __init__(self, model: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., max_length: _Optional[int] = ..., rows: _Optional[int] = ..., bid: _Optional[float] = ..., adapter: _Optional[str] = ..., session_id: _Optional[bytes] = ..., codec: _Optional[str] = ..., prefix: _Optional[bytes] = ..., no_queue: bool = ..., push_key: _Optional[bytes] = ..., request_id: _Optional[str] = ..., resumes: bool = ...) -> None: ...

class Info(_message.Message):
    __slots__ = ("accepted", "queue_length", "start_seconds", "tokens_per_second", "max_length", "cached_tokens", "max_step_tokens")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    queue_length: int
    start_seconds: float
    tokens_per_second: float
    max_length: int
    cached_tokens: int
    max_step_tokens: int
    def __init__(self, accepted: bool = ..., queue_length: _Optional[int] = ..., start_seconds: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., max_length: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., max_step_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "start_position", "parents", "hashes", "max_length", "request_id", "reordering", "route")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REORDERING_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    start_position: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    max_length: int
    request_id: str
    reordering: int
    route: _containers.RepeatedCompositeFieldContainer[Next]
    def __init__(self, step_id: _Optional[int] = ..., start_position: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., max_length: _Optional[int] = ..., request_id: _Optional[str] = ..., reordering: _Optional[int] = ..., route: _Optional[_Iterable[_Union[Next, _Mapping]]] = ...) -> None: ...

class Next(_message.Message):
    __slots__ = ("peer", "push_key")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    peer: str
    push_key: bytes
    def __init__(self, peer: _Optional[str] = ..., push_key: _Optional[bytes] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("number", "push_key", "step", "before")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    number: int
    push_key: bytes
    step: Step
    before: _containers.RepeatedCompositeFieldContainer[Timing]
    def __init__(self, number: _Optional[int] = ..., push_key: _Optional[bytes] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., before: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queued_ms", "compute_ms", "computed_tokens", "max_length", "there_and_back_ms")
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    THERE_AND_BACK_MS_FIELD_NUMBER: _ClassVar[int]
    queued_ms: float
    compute_ms: float
    computed_tokens: int
    max_length: int
    there_and_back_ms: float
    def __init__(self, queued_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., max_length: _Optional[int] = ..., there_and_back_ms: _Optional[float] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("step_id", "length", "queued_ms", "compute_ms", "computed_tokens", "max_length", "before", "unpushed")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNPUSHED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    length: int
    queued_ms: float
    compute_ms: float
    computed_tokens: int
    max_length: int
    before: _containers.RepeatedCompositeFieldContainer[Timing]
    unpushed: bool
    def __init__(self, step_id: _Optional[int] = ..., length: _Optional[int] = ..., queued_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., max_length: _Optional[int] = ..., before: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., unpushed: bool = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("within_seconds",)
    WITHIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    within_seconds: float
    def __init__(self, within_seconds: _Optional[float] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text", "retry_elsewhere", "step_id", "closed", "wait_seconds", "queue_length")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    text: str
    retry_elsewhere: bool
    step_id: int
    closed: bool
    wait_seconds: float
    queue_length: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., text: _Optional[str] = ..., retry_elsewhere: bool = ..., step_id: _Optional[int] = ..., closed: bool = ..., wait_seconds: _Optional[float] = ..., queue_length: _Optional[int] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("model", "start", "end", "adapter", "codec", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    start: int
    end: int
    adapter: str
    codec: str
    request_id: str
    def __init__(self, model: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., adapter: _Optional[str] = ..., codec: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Backward(_message.Message):
    __slots__ = ("model", "start", "end", "adapter", "codec", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    start: int
    end: int
    adapter: str
    codec: str
    request_id: str
    def __init__(self, model: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., adapter: _Optional[str] = ..., codec: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("token", "body")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    body: bytes
    def __init__(self, token: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...

class DialBack(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Dialled(_message.Message):
    __slots__ = ("addresses", "outcomes", "seen_at", "time", "version")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    outcomes: _containers.RepeatedScalarFieldContainer[str]
    seen_at: str
    time: float
    version: str
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., outcomes: _Optional[_Iterable[str]] = ..., seen_at: _Optional[str] = ..., time: _Optional[float] = ..., version: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("open", "info", "step", "output", "ping", "pong", "close", "error", "forward", "backward", "leaving", "push", "taken", "hello", "welcome", "dial_back", "dialled", "session", "tensors")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    DIALLED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    open: Open
    info: Info
    step: Step
    output: Output
    ping: Ping
    pong: Pong
    close: Close
    error: Error
    forward: Forward
    backward: Backward
    leaving: Leaving
    push: Push
    taken: Taken
    hello: Hello
    welcome: Welcome
    dial_back: DialBack
    dialled: Dialled
    session: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., info: _Optional[_Union[Info, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., backward: _Optional[_Union[Backward, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., dial_back: _Optional[_Union[DialBack, _Mapping]] = ..., dialled: _Optional[_Union[Dialled, _Mapping]] = ..., session: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...
