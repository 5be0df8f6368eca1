"""Prepared data that training reads while its later parts are still being prepared; see `data.streaming`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tasks.runtime.data.dataset import SAMPLES, PreparedData, RowDataset
from tasks.runtime.data.preparation.part_records import prepared_parts
from tasks.runtime.data.preparation.preparation_plan import Plan, parse_plan
from tasks.runtime.data.prepared_manifest import EMPTY, MANIFEST, PLAN, SKIP_REASONS, Manifest, Sample
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.data.shards import GrowingShards

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_REPORTS = 30.0


def fetch_manifest(folder: Path) -> bool:
    """Whether the data of a folder with a plan is complete; the manifest is fetched if the shards are elsewhere."""
    if (folder / MANIFEST).is_file():
        return True
    plan = parse_plan(ShardStore(folder).read(PLAN))
    if plan is None or plan.url is None:
        return False
    local, store = ShardStore(folder), plan.store(folder)
    found = store.read(MANIFEST)
    if found is None:
        return False
    local.write(SAMPLES, store.read(SAMPLES) or b"[]")
    local.write(MANIFEST, found)
    return True


def open_source(folder: Path, require_alive: Callable[[], None]) -> PreparedData:
    """Open a single source that is prepared, or whose preparation has begun.

    Raises:
        ValueError: the folder has neither.
    """
    complete = fetch_manifest(folder)
    plan = parse_plan(ShardStore(folder).read(PLAN))
    return PreparedData.load(folder) if complete or plan is None else GrowingData(folder, plan, require_alive)


class GrowingData(PreparedData):
    """Prepared data whose parts become known one after the other. Only its training rows can be read before the end.

    The counts in its manifest are those of nothing.
    """

    def __init__(self, folder: Path, plan: Plan, require_alive: Callable[[], None]) -> None:
        super().__init__(folder, _preliminary(plan))
        self._plan, self._require_alive = plan, require_alive
        tokenizer = self.tokenizer()
        # All ids that the tokenizer has: the largest one in the data is not known.
        largest = max(tokenizer.get_vocab().values())
        self.manifest = _preliminary(plan, len(tokenizer), largest, tokenizer.pad_token_id)

    @property
    def rows(self) -> int | None:
        """None: they are not counted yet."""
        return None

    @property
    def train(self) -> RowDataset:
        """Rows of the training split, which wait for the parts that they are in."""
        store = self._plan.store(self.folder)
        shards = GrowingShards(store, len(self._plan.parts), self.cache(), self._require_alive)
        return self._dataset(shards, None)

    @property
    def validation(self) -> RowDataset:
        """Rows of the validation split, after all parts."""
        return self.completed().validation

    def samples(self, n: int | None = None) -> list[Sample]:
        """The first `n` samples of the validation split, or all, after all parts."""
        return self.completed().samples(n)

    def completed(self) -> PreparedData:
        """The data once all of it is prepared."""
        reported = -_SECONDS_BETWEEN_REPORTS
        while not fetch_manifest(self.folder):
            self._require_alive()
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                done = len(prepared_parts(self._plan.store(self.folder)))
                log.info("waiting for the end of the preparation: %d of %d parts", done, len(self._plan.parts))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        found = PreparedData.load(self.folder)
        found.cache_bytes, found.cache_name = self.cache_bytes, self.cache_name
        return found


def _preliminary(plan: Plan, vocabulary: int = 0, largest: int = 0, pad: int = 0) -> Manifest:
    return Manifest(
        recipe=plan.recipe,
        recipe_hash=plan.recipe_hash,
        source=plan.source,
        format=plan.format,
        columns=plan.columns,
        sequence_length=plan.recipe["data"]["sequence_length"],
        packing=plan.recipe["data"]["packing"],
        samples_read=0,
        samples_used=0,
        skipped=dict.fromkeys(SKIP_REASONS, 0),
        truncated=0,
        split_long=0,
        split_turns=0,
        train=EMPTY,
        validation=EMPTY,
        vocabulary_size=vocabulary,
        largest_token_id=largest,
        pad_token_id=pad,
        stop_token_ids=(),
        versions=plan.versions,
        url=plan.url,
        plan_hash=plan.hash,
    )
