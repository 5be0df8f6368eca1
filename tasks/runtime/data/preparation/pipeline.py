"""The preparation pipeline: from a recipe to a folder with shards of rows, tokenizer, samples and manifest."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.chat.template_renderer import stop_rendering
from tasks.runtime.data.dataset import SAMPLES, TOKENIZER, PreparedData
from tasks.runtime.data.growing_data import fetch_manifest
from tasks.runtime.data.media.kinds import MEDIA
from tasks.runtime.data.media.media_processor import processor_of
from tasks.runtime.data.preparation.atomic_folder import atomic_folder, folder_lock, require_replaceable
from tasks.runtime.data.preparation.encode_rows import Report
from tasks.runtime.data.preparation.fingerprint import recipe_digest
from tasks.runtime.data.preparation.mixture_folder import claim_folder, compose, copy_tokenizer, source_folders
from tasks.runtime.data.preparation.part_processes import PlannedSource, in_turns, prepare_parts
from tasks.runtime.data.preparation.part_records import MAX_GENERATION_SAMPLES, PartRecord, in_all, read_record
from tasks.runtime.data.preparation.parts import PART_BYTES, Part, divide
from tasks.runtime.data.preparation.preparation_plan import Plan, make_plan, package_versions, parse_plan
from tasks.runtime.data.preparation.prepare_part import PartPreparer
from tasks.runtime.data.preparation.tokenizer import save_tokenizer
from tasks.runtime.data.prepared_manifest import MANIFEST, PLAN, Manifest, Split
from tasks.runtime.data.reading.readers import is_text
from tasks.runtime.data.reading.sources import Files, Source, open_source
from tasks.runtime.data.shard_store import ShardStore

# Texts are short if a row has more than this many times the median's tokens.
_SHORT = 16


def prepare(
    recipe: DataRecipe,
    out: Path,
    *,
    report: Report,
    url: str | None = None,
    processes: int | None = None,
    weights: Sequence[float | None] = (),
) -> PreparedData:
    """Prepare the recipe's data in the folder `out`, or reuse the data if `out` has the same recipe's already.

    A small source is prepared in this process, and its folder is written atomically. A large one is prepared part by
    part in several processes; killed, it continues without the parts that are done. The rows are the same for any
    number of processes. Concurrent preparations of the same folder wait for each other. A recipe without a fingerprint
    gets one here, so that changed files are noticed. Of several sources, each is prepared in a folder of its own or
    reused there: beside `out` or, with a URL, in it.

    report: called with lines for the log: the format, progress every few seconds, the final counts.
    url: an object store for the shards; `out` then has all the rest, and where they are.
    processes: for large sources; by default the processors that this process may use.
    weights: `data.sources` is read with these, by which its parts take turns.

    Raises:
        ValueError: the source is not found, unreadable or empty; a column is missing; a row is invalid and
            `data.invalid` is `error`; no sample is usable; or `out` has other files.
    """
    recipe, out = _identified(recipe), Path(out).absolute()
    with folder_lock(out), ExitStack() as locks:
        if found := _reusable(out, recipe):
            report(f"the data of recipe {recipe.hash()} is already prepared in {out}")
            return found
        started = time.monotonic()
        planned = _begin_sources(recipe, out, url, report, locks)
        parts = in_turns([*planned.values()], [_weight(recipe, number, weights) for number in planned])
        prepare_parts(parts, report=report, processes=processes)
        finish(out, report)
        report(f"prepared in {time.monotonic() - started:.1f} s")
    return PreparedData.load(out)


def begin(recipe: DataRecipe, out: Path, *, report: Report, url: str | None = None) -> dict[int, Plan]:
    """Do the work before the parts of large sources. Sources for evaluation only are prepared here, too.

    Returns the plans of those whose parts are left, by the number of the source; none if all data is prepared now.
    """
    recipe, out = _identified(recipe), Path(out).absolute()
    with folder_lock(out), ExitStack() as locks:
        if _reusable(out, recipe):
            return {}
        planned = _begin_sources(recipe, out, url, report, locks)
        for number in [number for number in planned if recipe.single_sources()[number].validation_only]:
            # Evaluation during training reads them.
            source = planned.pop(number)
            prepare_parts(in_turns([source], [None]), report=report)
            _finish_source(source.folder, report)
        if not planned:
            finish(out, report)
        return {number: source.plan for number, source in planned.items()}


def _identified(recipe: DataRecipe) -> DataRecipe:
    return recipe if recipe.fingerprint else recipe.model_copy(update={"fingerprint": recipe_digest(recipe)})


def _reusable(out: Path, recipe: DataRecipe) -> PreparedData | None:
    try:
        found = PreparedData.load(out)
    except ValueError:
        return None
    return found if found.manifest.recipe_hash == recipe.hash() else None


def _weight(recipe: DataRecipe, number: int, weights: Sequence[float | None]) -> float | None:
    """The weight of a single source; those for evaluation alone come first."""
    singles = recipe.single_sources()
    if singles[number].validation_only:
        return math.inf
    return weights[sum(not single.validation_only for single in singles[:number])] if weights else None


def _begin_sources(
    recipe: DataRecipe, out: Path, url: str | None, report: Report, locks: ExitStack
) -> dict[int, PlannedSource]:
    """Prepare the small sources, and plan the large ones. Returns these, as far as they are not complete.

    The caller holds the lock of `out`; `locks` gets the locks of sources that have separate folders.
    """
    recipes = recipe.single_sources()
    if len(recipes) == 1:
        plan = _begin(recipe, out, url, report)
        return {} if plan is None or fetch_manifest(out) else {0: PlannedSource(plan, out)}
    folders, found = claim_folder(recipe, out, url), dict[int, PlannedSource]()
    # In one order, so that no two preparations wait for each other.
    for folder in sorted({*folders}):
        locks.enter_context(folder_lock(folder))
    for number, (single, folder) in enumerate(zip(recipes, folders, strict=True)):
        evaluates = ", for evaluation" if single.validation_only else ""
        report(f"source {number + 1} of {len(recipes)}{evaluates}")
        if _reusable(folder, single):
            report(f"the data of recipe {single.hash()} is already prepared in {folder}")
        elif folder not in folders[:number]:
            plan = _begin_named(single, folder, url, report)
            if plan is not None and not fetch_manifest(folder):
                found[number] = PlannedSource(plan, folder)
    copy_tokenizer([(folder, _described(folder)) for folder in folders], out)
    return found


def _begin_named(recipe: DataRecipe, out: Path, url: str | None, report: Report) -> Plan | None:
    """`_begin` for one of several sources, whose errors say which one."""
    names = ", ".join(recipe.data.names)
    try:
        return _begin(recipe, out, url, report)
    except ValueError as error:
        if any(name in str(error) for name in recipe.data.names):
            raise
        raise ValueError(f"{names!r} of data.sources: {error}") from error


def _described(folder: Path) -> Manifest | Plan:
    """The state of a source whose preparation has begun."""
    return parse_plan(ShardStore(folder).read(PLAN)) or Manifest.read(folder)


def _begin(recipe: DataRecipe, out: Path, url: str | None, report: Report) -> Plan | None:
    """Prepare a small source whole, or find or make the plan of a large one. The caller holds the folder's lock."""
    # Refused before any work is done.
    require_replaceable(out)
    place = None if url is None else f"{url.rstrip('/')}/{recipe.hash()}"
    if plan := _known_plan(recipe, out, place):
        return plan
    source = open_source(recipe)
    for note in source.notes:
        report(f"{source.name}: {note}")
    parts = divide(source, max_samples=recipe.data.max_samples, seed=recipe.seed, part_bytes=PART_BYTES)
    if len(parts) > 1 or place is not None:
        return _make_plan(recipe, source, parts, out, place, report)
    with atomic_folder(out, is_usable=lambda: _reusable(out, recipe) is not None) as folder:
        _prepare_whole(recipe, source, parts, folder, report)
    return None


def _prepare_whole(recipe: DataRecipe, source: Source, parts: list[Part], folder: Path, report: Report) -> None:
    """Prepare a small source in this process."""
    try:
        plan, tokenizer, row_format = make_plan(recipe, source, parts, None, report)
        save_tokenizer(tokenizer, folder / TOKENIZER)
        record = PartPreparer(recipe, source, tokenizer, row_format).prepare(parts[0], folder, "", report)
    finally:
        stop_rendering()
    _write_manifest(plan, recipe, tokenizer, [record], folder, report)
    if isinstance(source, Files) and is_text(source.found[0][1]):
        _warn_of_separator(recipe, len(source.found), record.counts.read)


def _known_plan(recipe: DataRecipe, out: Path, place: str | None) -> Plan | None:
    """The plan of an earlier preparation, in `out` or its place in an object store, if it still holds."""
    local = ShardStore(out)
    store = local if place is None else ShardStore(place)
    content = store.read(PLAN)
    plan = parse_plan(content)
    if plan is None or plan.recipe_hash != recipe.hash() or plan.versions != package_versions(recipe.data):
        return None
    if content != local.read(PLAN):
        with atomic_folder(out, is_usable=lambda: False) as folder:
            store.get_folder(TOKENIZER, folder / TOKENIZER)
            ShardStore(folder).write(PLAN, plan.to_json())
    return plan


def _make_plan(
    recipe: DataRecipe, source: Source, parts: list[Part], out: Path, place: str | None, report: Report
) -> Plan:
    """Write the plan of a source and its tokenizer to `out`, and to its place in an object store."""
    try:
        plan, tokenizer, _ = make_plan(recipe, source, parts, place, report)
    finally:
        stop_rendering()
    with atomic_folder(out, is_usable=lambda: False) as folder:
        save_tokenizer(tokenizer, folder / TOKENIZER)
        if place is not None:
            store = ShardStore(place)
            store.clear()
            store.put_folder(folder / TOKENIZER, TOKENIZER)
            # Last: without it, what is in the store is no beginning of anything.
            store.write(PLAN, plan.to_json())
        ShardStore(folder).write(PLAN, plan.to_json())
    return plan


def prepare_range(out: Path, number: int, parts: range, report: Report) -> None:
    """Prepare some parts of a source whose preparation was begun in the folder `out`, without those that are done.

    Raises ValueError and RuntimeError as `prepare_parts`.
    """
    folder = (source_folders(out) or [out])[number]
    plan = parse_plan(ShardStore(folder).read(PLAN))
    assert plan is not None
    source = PlannedSource(plan, folder)
    prepare_parts([(source, part) for part in parts], report=report)


def finish(out: Path, report: Report) -> None:
    """Write the manifest of data whose parts are all prepared.

    Raises ValueError when no sample of a source is usable.
    """
    folders = source_folders(out)
    for folder in dict.fromkeys(folders or [out]):
        if not fetch_manifest(folder):
            _finish_source(folder, report)
    if folders:
        compose(out, [PreparedData.load(folder) for folder in folders])


def _finish_source(out: Path, report: Report) -> None:
    plan = parse_plan(ShardStore(out).read(PLAN))
    assert plan is not None
    recipe, store = DataRecipe.model_validate(plan.recipe), plan.store(out)
    records: list[PartRecord] = []
    for number in range(len(plan.parts)):
        record = read_record(store, number)
        assert record is not None, f"part {number} is not prepared"
        if sum(len(one.samples) for one in records[:MAX_GENERATION_SAMPLES]) >= MAX_GENERATION_SAMPLES:
            record.samples.clear()
        records.append(record)
    tokenizer = AutoTokenizer.from_pretrained(str(out / TOKENIZER), trust_remote_code=False)
    _write_manifest(plan, recipe, tokenizer, records, out, report)
    files = {piece.file for part in plan.parts for piece in part.pieces or ()}
    _warn_of_separator(recipe, len(files), sum(record.counts.read for record in records))
    if plan.url is not None:
        for name in (SAMPLES, MANIFEST):
            store.write(name, (out / name).read_bytes())


def _warn_of_separator(recipe: DataRecipe, files: int, documents: int) -> None:
    separator = recipe.data.document_separator
    if separator is not None and documents <= files:
        warnings.warn(
            f"data.document_separator {separator!r} divides none of the text files: each of the {files:,} is one "
            "document; correct it, or leave it out",
            stacklevel=5,
        )


def _write_manifest(
    plan: Plan,
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    records: list[PartRecord],
    folder: Path,
    report: Report,
) -> None:
    """Write the samples and the manifest of prepared parts, and log their counts.

    Raises ValueError when no sample is usable.
    """
    whole = in_all(records)
    counts = whole.counts
    if not counts.used:
        told = "; ".join([str(counts), *counts.first_skipped()])
        raise ValueError(f"data.source {plan.source!r}: nothing is left to train on; {told}")
    versions = plan.versions
    if whole.media_read:
        medium = next(medium for medium in MEDIA if medium.name == whole.medium)
        reduced = f", {whole.media_reduced:,} made smaller by the model's processor" if whole.media_reduced else ""
        report(f"{whole.media_read:,} {medium.several} read, {whole.media_changed:,} {medium.changed}{reduced}")
        processor = processor_of(recipe, tokenizer)
        assert processor is not None
        processor(medium).save(folder / TOKENIZER)
        versions = {**versions, **{package: version(package) for package in medium.packages}}
    _report_special_tokens(plan, whole, report)
    if plan.format == "text":
        _report_lengths(recipe, whole, report)
    if whole.ends:
        share = f"the last {100 * recipe.data.validation_fraction:g} % of each long text"
        report(f"validation: {share}, because whole texts would be too much or none")
    stored = json.dumps([sample._asdict() for sample in whole.samples], ensure_ascii=False, indent=1)
    (folder / SAMPLES).write_text(stored + "\n", encoding="utf-8")
    stop_tokens = _stop_tokens(tokenizer, set(whole.turn_end_ids))
    manifest = Manifest(
        recipe=plan.recipe,
        recipe_hash=plan.recipe_hash,
        source=plan.source,
        format=plan.format,
        columns=plan.columns,
        sequence_length=recipe.data.sequence_length,
        packing=recipe.data.packing,
        samples_read=counts.read,
        samples_used=counts.used,
        skipped=counts.skipped,
        truncated=counts.truncated,
        split_long=counts.split_long,
        split_turns=counts.split_turns,
        train=whole.train,
        validation=whole.validation,
        vocabulary_size=len(tokenizer),
        largest_token_id=max(whole.largest_token_id, tokenizer.pad_token_id, *stop_tokens),
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=stop_tokens,
        versions=versions,
        url=plan.url,
        plan_hash=plan.hash if plan.divided else None,
    )
    assert manifest.samples_read == manifest.samples_used + sum(manifest.skipped.values())
    manifest.write(folder)
    for line in (str(counts), *counts.first_skipped()):
        report(f"{plan.source}: {line}")
    for name, split in (("train", whole.train), ("validation", whole.validation)):
        if name == "validation" or not recipe.validation_only:
            report(_describe(name, split, manifest))


def _report_special_tokens(plan: Plan, whole: PartRecord, report: Report) -> None:
    if whole.special_example:
        token, where = whole.special_example
        taken, other = ("control tokens", "text") if plan.control else ("text", "control")
        report(
            f"{whole.special_found:,} samples contain special tokens, such as {token!r} in {where}, which are taken as "
            f"{taken}; to change that, set data.special_tokens to {other!r}"
        )


def _report_lengths(recipe: DataRecipe, whole: PartRecord, report: Report) -> None:
    """Report the texts' lengths. Warns when most are so short that rows hold hardly any context."""
    median, length = whole.median, recipe.data.sequence_length
    report(f"{whole.documents:,} documents, median {median:,} tokens")
    if recipe.objective == "pretrain" and not recipe.validation_only and median * _SHORT < length:
        way_out = "join texts that belong together"
        if recipe.data.documents != "file":
            way_out = "set data.documents to 'file'"
        elif recipe.data.document_separator is not None:
            way_out = "leave out data.document_separator"
        warnings.warn(
            f"half of the documents have at most {median:,} tokens, far fewer than data.sequence_length {length:,}, "
            f"and none attends to another: the model sees little context. To train on longer ones, {way_out}.",
            stacklevel=4,
        )


def _stop_tokens(tokenizer: PreTrainedTokenizerBase, turn_end_ids: set[int]) -> tuple[int, ...]:
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    end_ids = turn_end_ids & special
    if turn_end_ids and not end_ids:
        warnings.warn(
            "data.chat_template: no special token ends the assistant's turns, so the model will not learn to stop",
            stacklevel=2,
        )
    return tuple(sorted({tokenizer.eos_token_id, *end_ids}))


def _describe(name: str, split: Split, manifest: Manifest) -> str:
    rows = f"{split.rows:,} row{'' if split.rows == 1 else 's'}"
    if manifest.packing:
        rows += f" of {manifest.sequence_length} tokens, {100 * split.fill(manifest.sequence_length):.1f} % full"
    return f"{name}: {split.samples:,} samples, {split.tokens:,} tokens, {split.target_tokens:,} with loss, in {rows}"
