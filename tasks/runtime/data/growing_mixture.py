"""Open prepared data for training, also that of several sources of which some are still being prepared."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from torch.utils.data import Subset

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import Data
from tasks.runtime.data.dataset import PreparedData, Row, RowDataset
from tasks.runtime.data.growing_data import fetch_manifest, open_source
from tasks.runtime.data.preparation.document_buffer import SHARD_TOKENS
from tasks.runtime.data.preparation.mixture_folder import compose, merged, mixture_of, source_folders
from tasks.runtime.data.prepared_manifest import EMPTY, Manifest, Sample
from tasks.runtime.data.shards import Shards

# An int32 and a bool for each token, and the bounds of documents and rows.
_LARGEST_SHARD = 6 * SHARD_TOKENS
_SECONDS_BETWEEN_LOOKS = 0.5
# Room for the rows of a source, whose number is not known.
_ROOM = 1 << 40


def open_prepared(folder: Path, data: Data, require_alive: Callable[[], None] = lambda: None) -> PreparedData:
    """Open prepared data for training, also before it is complete if `data.streaming` is set.

    require_alive: raises an error when the preparation has failed.

    Raises:
        ValueError: the folder has no prepared data, or `data.cache_gib` is too small for it.
    """
    found: PreparedData
    if fetch_manifest(folder) or not data.streaming:
        found = PreparedData.load(folder)
    elif sources := source_folders(folder):
        found = GrowingMixture(folder, [open_source(source, require_alive) for source in sources], require_alive)
    else:
        found = open_source(folder, require_alive)
    found.cache_bytes = data.cache_bytes
    if found.manifest.url is not None:
        _require_cache(found, data)
    return found


def _require_cache(found: PreparedData, data: Data) -> None:
    """Raises ValueError when shards would be fetched again and again, because the cache is too small."""
    needed = sum(_bytes_at_a_time(source, data) for source in found.manifest.trained)
    if found.cache_bytes < needed:
        way_out = "lower data.shuffle_window" if data.shuffle == "window" else "set data.shuffle to 'window'"
        reads = "all rows" if data.shuffle == "global" else f"two windows of {data.window} shards"
        each = " of each source" if len(found.manifest.trained) > 1 else ""
        raise ValueError(
            f"data.cache_gib {data.cache_bytes / 2**30:g} is too small: data.shuffle {data.shuffle!r} reads "
            f"{reads}{each}, {needed / 2**30:.2f} GiB, at a time; raise it, or {way_out}"
        )


def _bytes_at_a_time(source: Manifest, data: Data) -> int:
    sizes = [shard.bytes for shard in source.train.shards]
    windows = 2 * data.window * max(sizes, default=_LARGEST_SHARD)
    return sum(sizes) if sizes and (data.shuffle == "global" or sum(sizes) < windows) else windows


class MixtureRows(RowDataset):
    """Rows of several sources, of which each has room for any number: those of source k begin at k times 2^40."""

    def __init__(self, sources: Sequence[RowDataset]) -> None:
        self._sources = sources
        self._first = [number * _ROOM for number in range(len(sources))]

    def __len__(self) -> int:
        """Rows of the shards that are known."""
        return sum(map(len, self._sources))

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._first, index) - 1
        return self._sources[number][index - self._first[number]]

    def by_source(self, manifest: Manifest) -> list[tuple[int, Shards]]:
        """The index of the first training row and the shards of each source."""
        return [(first, rows.shards) for first, rows in zip(self._first, self._sources, strict=True)]


class GrowingMixture(PreparedData):
    """Several sources, of which at least one is still being prepared.

    The counts in its manifest are those of the sources that are complete.
    """

    def __init__(self, folder: Path, sources: Sequence[PreparedData], require_alive: Callable[[], None]) -> None:
        recipe, self._url = mixture_of(folder)
        manifests = [source.manifest for source in sources]
        super().__init__(folder, merged(recipe, manifests, manifests))
        self._sources, self._require_alive = sources, require_alive

    @property
    def rows(self) -> int | None:
        """None: they are not counted yet."""
        return None

    @property
    def train(self) -> RowDataset:
        """Rows of the training split, which wait for the parts that they are in."""
        return MixtureRows([source.train for source in self._opened() if source.manifest.is_trained])

    @property
    def validation(self) -> RowDataset:
        """Rows of the validation split, after all parts."""
        return self.completed().validation

    def validation_by_source(self) -> list[RowDataset | Subset[Row]]:
        """Rows of the validation split of each source; after all parts, if some hold rows out."""
        if self._holds_out():
            return self.completed().validation_by_source()
        return [
            source.validation if source.rows is not None else source._dataset(Shards(source.folder, EMPTY), None)
            for source in self._opened()
        ]

    def samples(self, n: int | None = None) -> list[Sample]:
        """The first `n` samples of the validation split, or all; after all parts, if some hold rows out."""
        if self._holds_out():
            return self.completed().samples(n)
        rounds = zip_longest(*(source.samples() for source in self._sources if source.rows is not None))
        return list(islice((sample for sample in chain.from_iterable(rounds) if sample is not None), n))

    def completed(self) -> PreparedData:
        """The data once all of it is prepared."""
        sources = [source.completed() for source in self._opened()]
        if self._url is not None:
            # On another machine than the preparation, this folder is a copy.
            compose(self.folder, sources)
        while not fetch_manifest(self.folder):
            self._require_alive()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        found = PreparedData.load(self.folder)
        found.cache_bytes = self.cache_bytes
        return found

    def _holds_out(self) -> bool:
        recipes = [DataRecipe.model_validate(source.manifest.recipe) for source in self._sources if source.rows is None]
        return any(recipe.data.validation_fraction > 0 for recipe in recipes)

    def _opened(self) -> Sequence[PreparedData]:
        """The sources, which share a cache with the data once it is complete."""
        for source in self._sources:
            source.cache_bytes, source.cache_name = self.cache_bytes, self.manifest.recipe_hash
        return self._sources
