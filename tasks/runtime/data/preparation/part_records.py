"""The records of prepared parts: what became of each, and together."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tasks.runtime.data.preparation.encode_rows import Counts
from tasks.runtime.data.prepared_manifest import EMPTY, Sample, Split, split_of
from tasks.runtime.data.shard_store import ShardStore

PARTS = "parts"
MAX_GENERATION_SAMPLES = 64


@dataclass
class PartRecord:
    """What became of a part: counts, shards, and what the manifest takes from all parts.

    medium: what samples have beside text, "image" or "audio". media_read, media_changed, media_reduced: of all
    samples, those that were skipped included.
    documents, median: texts, and the middle one's tokens; of other formats 0. ends: the ends of long texts are held
    out rather than whole ones.
    """

    counts: Counts = field(default_factory=Counts)
    train: Split = EMPTY
    validation: Split = EMPTY
    documents: int = 0
    median: int = 0
    ends: bool = False
    largest_token_id: int = 0
    turn_end_ids: list[int] = field(default_factory=list)
    medium: str | None = None
    media_read: int = 0
    media_changed: int = 0
    media_reduced: int = 0
    special_found: int = 0
    special_example: tuple[str, str] | None = None
    samples: list[Sample] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The record as a file."""
        values = {**asdict(self), "samples": [sample._asdict() for sample in self.samples]}
        return json.dumps(values, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, content: bytes) -> PartRecord:
        """The record in a file."""
        values: dict[str, Any] = json.loads(content)
        values["counts"] = Counts(**values["counts"])
        values["samples"] = [Sample(**sample) for sample in values["samples"]]
        for name in ("train", "validation"):
            values[name] = split_of(values[name])
        return cls(**values)


def record_name(number: int) -> str:
    """The name of the record of a part."""
    return f"{PARTS}/{number:05d}.json"


def read_record(store: ShardStore, number: int) -> PartRecord | None:
    """The record of a part; None before the part is prepared."""
    content = store.read(record_name(number))
    return None if content is None else PartRecord.from_json(content)


def prepared_parts(store: ShardStore) -> set[int]:
    """The numbers of the parts that are prepared."""
    return {int(name.removesuffix(".json")) for name in store.names(PARTS) if name.endswith(".json")}


def in_all(records: list[PartRecord]) -> PartRecord:
    """The record of several parts together."""
    whole = replace(records[0])
    for record in records[1:]:
        whole.counts = whole.counts + record.counts
        whole.train, whole.validation = whole.train + record.train, whole.validation + record.validation
        whole.largest_token_id = max(whole.largest_token_id, record.largest_token_id)
        whole.special_found += record.special_found
        whole.medium = whole.medium or record.medium
        whole.media_read += record.media_read
        whole.media_changed += record.media_changed
        whole.media_reduced += record.media_reduced
        whole.special_example = whole.special_example or record.special_example
        whole.ends = whole.ends or record.ends
    whole.median = weighted_median([(record.median, record.documents) for record in records])
    whole.documents = sum(record.documents for record in records)
    whole.turn_end_ids = sorted({id_ for record in records for id_ in record.turn_end_ids})
    whole.samples = [sample for record in records for sample in record.samples][:MAX_GENERATION_SAMPLES]
    return whole


def weighted_median(medians: list[tuple[int, int]]) -> int:
    """About the median of several groups, of medians and sizes."""
    half, seen = sum(size for _, size in medians) / 2, 0
    for median, size in sorted(medians):
        seen += size
        if seen >= half:
            return median
    return 0
