from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_UNSPECIFIED: _ClassVar[End]
    END_RAGGED: _ClassVar[End]
    END_DROP: _ClassVar[End]
    END_PAD: _ClassVar[End]

class ListPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIST_POLICY_UNSPECIFIED: _ClassVar[ListPolicy]
    LIST_POLICY_PADDED: _ClassVar[ListPolicy]
    LIST_POLICY_RAGGED: _ClassVar[ListPolicy]

class TruncationSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATION_SIDE_UNSPECIFIED: _ClassVar[TruncationSide]
    TRUNCATION_SIDE_RIGHT: _ClassVar[TruncationSide]
    TRUNCATION_SIDE_LEFT: _ClassVar[TruncationSide]

class NullPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NULL_POLICY_UNSPECIFIED: _ClassVar[NullPolicy]
    NULL_POLICY_FILL: _ClassVar[NullPolicy]
    NULL_POLICY_MASK: _ClassVar[NullPolicy]

class Cut(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUT_UNSPECIFIED: _ClassVar[Cut]
    CUT_WHOLE: _ClassVar[Cut]
    CUT_CENTER: _ClassVar[Cut]
    CUT_RANDOM: _ClassVar[Cut]

class Decoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECODING_UNSPECIFIED: _ClassVar[Decoding]
    DECODING_AUTO: _ClassVar[Decoding]
    DECODING_EXACT: _ClassVar[Decoding]
    DECODING_FAST: _ClassVar[Decoding]

class PackPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACK_POLICY_UNSPECIFIED: _ClassVar[PackPolicy]
    PACK_POLICY_BEST_FIT: _ClassVar[PackPolicy]
    PACK_POLICY_WRAP: _ClassVar[PackPolicy]
    PACK_POLICY_PAD: _ClassVar[PackPolicy]

class LongPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LONG_POLICY_UNSPECIFIED: _ClassVar[LongPolicy]
    LONG_POLICY_FRAGMENT: _ClassVar[LongPolicy]
    LONG_POLICY_TRUNCATE: _ClassVar[LongPolicy]
    LONG_POLICY_DROP: _ClassVar[LongPolicy]

class Exhausted(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXHAUSTED_UNSPECIFIED: _ClassVar[Exhausted]
    EXHAUSTED_STOP: _ClassVar[Exhausted]
    EXHAUSTED_RENORMALISE: _ClassVar[Exhausted]
    EXHAUSTED_CYCLE: _ClassVar[Exhausted]
END_UNSPECIFIED: End
END_RAGGED: End
END_DROP: End
END_PAD: End
LIST_POLICY_UNSPECIFIED: ListPolicy
LIST_POLICY_PADDED: ListPolicy
LIST_POLICY_RAGGED: ListPolicy
TRUNCATION_SIDE_UNSPECIFIED: TruncationSide
TRUNCATION_SIDE_RIGHT: TruncationSide
TRUNCATION_SIDE_LEFT: TruncationSide
NULL_POLICY_UNSPECIFIED: NullPolicy
NULL_POLICY_FILL: NullPolicy
NULL_POLICY_MASK: NullPolicy
CUT_UNSPECIFIED: Cut
CUT_WHOLE: Cut
CUT_CENTER: Cut
CUT_RANDOM: Cut
DECODING_UNSPECIFIED: Decoding
DECODING_AUTO: Decoding
DECODING_EXACT: Decoding
DECODING_FAST: Decoding
PACK_POLICY_UNSPECIFIED: PackPolicy
PACK_POLICY_BEST_FIT: PackPolicy
PACK_POLICY_WRAP: PackPolicy
PACK_POLICY_PAD: PackPolicy
LONG_POLICY_UNSPECIFIED: LongPolicy
LONG_POLICY_FRAGMENT: LongPolicy
LONG_POLICY_TRUNCATE: LongPolicy
LONG_POLICY_DROP: LongPolicy
EXHAUSTED_UNSPECIFIED: Exhausted
EXHAUSTED_STOP: Exhausted
EXHAUSTED_RENORMALISE: Exhausted
EXHAUSTED_CYCLE: Exhausted

class Error(_message.Message):
    __slots__ = ("name", "message", "nouns")
    class NounsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NOUNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    message: str
    nouns: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., message: _Optional[str] = ..., nouns: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ColumnValue(_message.Message):
    __slots__ = ("column", "value")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    column: str
    value: float
    def __init__(self, column: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ColumnLength(_message.Message):
    __slots__ = ("column", "length")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    column: str
    length: int
    def __init__(self, column: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class ColumnDtype(_message.Message):
    __slots__ = ("column", "dtype")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    column: str
    dtype: str
    def __init__(self, column: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class StepSpec(_message.Message):
    __slots__ = ("name", "numbers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    numbers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., numbers: _Optional[_Iterable[float]] = ...) -> None: ...

class ImageSpec(_message.Message):
    __slots__ = ("column", "height", "width", "cut", "resize", "scale", "ratio", "flip", "layout", "dtype", "mean", "std", "decode", "steps", "replaces")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    column: str
    height: int
    width: int
    cut: Cut
    resize: _containers.RepeatedScalarFieldContainer[int]
    scale: _containers.RepeatedScalarFieldContainer[float]
    ratio: _containers.RepeatedScalarFieldContainer[float]
    flip: float
    layout: str
    dtype: str
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    decode: Decoding
    steps: _containers.RepeatedCompositeFieldContainer[StepSpec]
    replaces: bool
    def __init__(self, column: _Optional[str] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., cut: _Optional[_Union[Cut, str]] = ..., resize: _Optional[_Iterable[int]] = ..., scale: _Optional[_Iterable[float]] = ..., ratio: _Optional[_Iterable[float]] = ..., flip: _Optional[float] = ..., layout: _Optional[str] = ..., dtype: _Optional[str] = ..., mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ..., decode: _Optional[_Union[Decoding, str]] = ..., steps: _Optional[_Iterable[_Union[StepSpec, _Mapping]]] = ..., replaces: bool = ...) -> None: ...

class ReplacedRow(_message.Message):
    __slots__ = ("url", "shard", "row", "instead", "reason")
    URL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    url: str
    shard: int
    row: int
    instead: int
    reason: str
    def __init__(self, url: _Optional[str] = ..., shard: _Optional[int] = ..., row: _Optional[int] = ..., instead: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StackSpec(_message.Message):
    __slots__ = ("name", "columns", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ...) -> None: ...

class ColumnOptions(_message.Message):
    __slots__ = ("columns", "lists", "fill_null", "stack", "fill_null_all", "nulls", "pad_value", "pad_value_all", "max_length", "max_length_all", "truncation_side", "codes", "dtype")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    LISTS_FIELD_NUMBER: _ClassVar[int]
    FILL_NULL_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    FILL_NULL_ALL_FIELD_NUMBER: _ClassVar[int]
    NULLS_FIELD_NUMBER: _ClassVar[int]
    PAD_VALUE_FIELD_NUMBER: _ClassVar[int]
    PAD_VALUE_ALL_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_ALL_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_SIDE_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    lists: ListPolicy
    fill_null: _containers.RepeatedCompositeFieldContainer[ColumnValue]
    stack: _containers.RepeatedCompositeFieldContainer[StackSpec]
    fill_null_all: float
    nulls: NullPolicy
    pad_value: _containers.RepeatedCompositeFieldContainer[ColumnValue]
    pad_value_all: float
    max_length: _containers.RepeatedCompositeFieldContainer[ColumnLength]
    max_length_all: int
    truncation_side: TruncationSide
    codes: _containers.RepeatedScalarFieldContainer[str]
    dtype: _containers.RepeatedCompositeFieldContainer[ColumnDtype]
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., lists: _Optional[_Union[ListPolicy, str]] = ..., fill_null: _Optional[_Iterable[_Union[ColumnValue, _Mapping]]] = ..., stack: _Optional[_Iterable[_Union[StackSpec, _Mapping]]] = ..., fill_null_all: _Optional[float] = ..., nulls: _Optional[_Union[NullPolicy, str]] = ..., pad_value: _Optional[_Iterable[_Union[ColumnValue, _Mapping]]] = ..., pad_value_all: _Optional[float] = ..., max_length: _Optional[_Iterable[_Union[ColumnLength, _Mapping]]] = ..., max_length_all: _Optional[int] = ..., truncation_side: _Optional[_Union[TruncationSide, str]] = ..., codes: _Optional[_Iterable[str]] = ..., dtype: _Optional[_Iterable[_Union[ColumnDtype, _Mapping]]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("where", "sample", "split_from", "split_to", "limit", "map", "collate", "pack")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FROM_FIELD_NUMBER: _ClassVar[int]
    SPLIT_TO_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    COLLATE_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    where: str
    sample: int
    split_from: int
    split_to: int
    limit: int
    map: str
    collate: str
    pack: PackSpec
    def __init__(self, where: _Optional[str] = ..., sample: _Optional[int] = ..., split_from: _Optional[int] = ..., split_to: _Optional[int] = ..., limit: _Optional[int] = ..., map: _Optional[str] = ..., collate: _Optional[str] = ..., pack: _Optional[_Union[PackSpec, _Mapping]] = ...) -> None: ...

class PackSpec(_message.Message):
    __slots__ = ("column", "length", "policy", "long", "carry", "outputs", "multiple", "documents", "pad_value", "balanced", "loss_mask", "dtype")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LONG_FIELD_NUMBER: _ClassVar[int]
    CARRY_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PAD_VALUE_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    column: str
    length: int
    policy: PackPolicy
    long: LongPolicy
    carry: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    multiple: int
    documents: int
    pad_value: int
    balanced: bool
    loss_mask: str
    dtype: str
    def __init__(self, column: _Optional[str] = ..., length: _Optional[int] = ..., policy: _Optional[_Union[PackPolicy, str]] = ..., long: _Optional[_Union[LongPolicy, str]] = ..., carry: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[str]] = ..., multiple: _Optional[int] = ..., documents: _Optional[int] = ..., pad_value: _Optional[int] = ..., balanced: bool = ..., loss_mask: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("fingerprint", "seed", "shuffle", "lanes", "window", "global_batch", "end", "transforms", "column_options", "ramp", "view", "mixture")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RAMP_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    seed: int
    shuffle: bool
    lanes: int
    window: int
    global_batch: int
    end: End
    transforms: _containers.RepeatedCompositeFieldContainer[ImageSpec]
    column_options: ColumnOptions
    ramp: int
    view: View
    mixture: MixtureSpec
    def __init__(self, fingerprint: _Optional[str] = ..., seed: _Optional[int] = ..., shuffle: bool = ..., lanes: _Optional[int] = ..., window: _Optional[int] = ..., global_batch: _Optional[int] = ..., end: _Optional[_Union[End, str]] = ..., transforms: _Optional[_Iterable[_Union[ImageSpec, _Mapping]]] = ..., column_options: _Optional[_Union[ColumnOptions, _Mapping]] = ..., ramp: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ..., mixture: _Optional[_Union[MixtureSpec, _Mapping]] = ...) -> None: ...

class MixtureSpec(_message.Message):
    __slots__ = ("sources", "exhausted", "length", "batch", "source_column", "tokens", "schedule", "changes")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COLUMN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceSpec]
    exhausted: Exhausted
    length: int
    batch: int
    source_column: str
    tokens: int
    schedule: _containers.RepeatedCompositeFieldContainer[ScheduledShares]
    changes: _containers.RepeatedCompositeFieldContainer[ShareChange]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceSpec, _Mapping]]] = ..., exhausted: _Optional[_Union[Exhausted, str]] = ..., length: _Optional[int] = ..., batch: _Optional[int] = ..., source_column: _Optional[str] = ..., tokens: _Optional[int] = ..., schedule: _Optional[_Iterable[_Union[ScheduledShares, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[ShareChange, _Mapping]]] = ...) -> None: ...

class ScheduledShares(_message.Message):
    __slots__ = ("step", "shares")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    step: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ...) -> None: ...

class ShareChange(_message.Message):
    __slots__ = ("epoch", "position", "shares")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ...) -> None: ...

class MixHistory(_message.Message):
    __slots__ = ("changes", "length")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[ShareChange]
    length: int
    def __init__(self, changes: _Optional[_Iterable[_Union[ShareChange, _Mapping]]] = ..., length: _Optional[int] = ...) -> None: ...

class SourceSpec(_message.Message):
    __slots__ = ("name", "fingerprint", "share", "passes_max", "window", "ramp", "view")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PASSES_MAX_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    RAMP_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    share: int
    passes_max: int
    window: int
    ramp: int
    view: View
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., share: _Optional[int] = ..., passes_max: _Optional[int] = ..., window: _Optional[int] = ..., ramp: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class DatasetIdentity(_message.Message):
    __slots__ = ("content", "layout")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    content: str
    layout: str
    def __init__(self, content: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class LedgerPosition(_message.Message):
    __slots__ = ("epoch", "cursor")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cursor: int
    def __init__(self, epoch: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("seq", "kind", "position", "payload", "by", "at", "previous")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    kind: str
    position: LedgerPosition
    payload: str
    by: str
    at: float
    previous: str
    def __init__(self, seq: _Optional[int] = ..., kind: _Optional[str] = ..., position: _Optional[_Union[LedgerPosition, _Mapping]] = ..., payload: _Optional[str] = ..., by: _Optional[str] = ..., at: _Optional[float] = ..., previous: _Optional[str] = ...) -> None: ...

class LedgerMark(_message.Message):
    __slots__ = ("seq", "hash")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hash: str
    def __init__(self, seq: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class Tombstone(_message.Message):
    __slots__ = ("shard", "row", "source", "of_view")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OF_VIEW_FIELD_NUMBER: _ClassVar[int]
    shard: int
    row: int
    source: int
    of_view: int
    def __init__(self, shard: _Optional[int] = ..., row: _Optional[int] = ..., source: _Optional[int] = ..., of_view: _Optional[int] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("dp_rank", "dp_size", "rank", "world_size", "local_rank", "local_world_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "source")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_RANK_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    dp_size: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    source: str
    def __init__(self, dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., cp_rank: _Optional[int] = ..., cp_size: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...
