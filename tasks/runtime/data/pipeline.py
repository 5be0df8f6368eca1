"""The preparation pipeline: from a recipe to a folder with shards of rows, tokenizer, samples and manifest."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.atomic_folder import atomic_folder, folder_lock, require_replaceable
from tasks.runtime.data.dataset import SAMPLES, TOKENIZER, PreparedData
from tasks.runtime.data.encode_rows import Report
from tasks.runtime.data.fingerprint import recipe_digest
from tasks.runtime.data.mixture import compose
from tasks.runtime.data.part_processes import prepare_parts, read_record
from tasks.runtime.data.parts import PART_BYTES, Part, divide
from tasks.runtime.data.preparation_plan import Plan, make_plan, package_versions, parse_plan
from tasks.runtime.data.prepare_part import PartPreparer, PartRecord, in_all
from tasks.runtime.data.prepared_manifest import PLAN, Manifest, Split
from tasks.runtime.data.readers import is_text
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.data.sources import Files, Source, open_source
from tasks.runtime.data.template_renderer import stop_rendering
from tasks.runtime.data.tokenizer import save_tokenizer

# Texts are short if a row has more than this many times the median's tokens.
_SHORT = 16


def prepare(recipe: DataRecipe, out: Path, *, report: Report, processes: int | None = None) -> PreparedData:
    """Prepare the recipe's data in the folder `out`, or reuse the data if `out` has the same recipe's already.

    A small source is prepared in this process, and its folder is written atomically. A large one is prepared part by
    part in several processes; killed, it continues without the parts that are done. The rows are the same for any
    number of processes. Concurrent preparations of the same folder wait for each other. A recipe without a fingerprint
    gets one here, so that changed files are noticed. Of several sources, each is prepared in a folder of its own beside
    `out`, or reused there.

    report: called with lines for the log: the format, progress every few seconds, the final counts.
    processes: for a large source; by default the processors that this process may use.

    Raises:
        ValueError: the source is not found, unreadable or empty; a column is missing; a row is invalid and
            `data.invalid` is `error`; no sample is usable; or `out` has other files.
    """
    if not recipe.fingerprint:
        recipe = recipe.model_copy(update={"fingerprint": recipe_digest(recipe)})
    out = Path(out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(out):
        if found := _reusable(out, recipe):
            report(f"the data of recipe {recipe.hash()} is already prepared in {out}")
            return found
        # Refused before any work is done.
        require_replaceable(out)
        if len(recipe.single_sources()) > 1:
            return _prepare_mixture(recipe, out, report, processes)
        started = time.monotonic()
        source = open_source(recipe)
        for note in source.notes:
            report(f"{source.name}: {note}")
        parts = divide(source, max_samples=recipe.data.max_samples, seed=recipe.seed, part_bytes=PART_BYTES)
        if len(parts) > 1:
            _prepare_parts(recipe, source, parts, out, report, processes)
        else:
            with atomic_folder(out, is_usable=lambda: _reusable(out, recipe) is not None) as folder:
                _prepare_whole(recipe, source, parts, folder, report)
        report(f"prepared in {time.monotonic() - started:.1f} s")
    prepared = PreparedData.load(out)
    if isinstance(source, Files):
        _warn_of_separator(source, prepared.manifest.samples_read)
    return prepared


def _warn_of_separator(source: Files, documents: int) -> None:
    separator = source.texts.separator
    if separator is not None and documents <= len(source.found) and is_text(source.found[0][1]):
        warnings.warn(
            f"data.document_separator {separator!r} divides none of the text files: each of the "
            f"{len(source.found):,} is one document; correct it, or leave it out",
            stacklevel=3,
        )


def _reusable(out: Path, recipe: DataRecipe) -> PreparedData | None:
    try:
        found = PreparedData.load(out)
    except ValueError:
        return None
    return found if found.manifest.recipe_hash == recipe.hash() else None


def _prepare_mixture(recipe: DataRecipe, out: Path, report: Report, processes: int | None) -> PreparedData:
    """Prepare each of several sources by its own recipe, and link them into one folder."""
    recipes, prepared = recipe.single_sources(), []
    for number, single in enumerate(recipes, start=1):
        report(f"source {number} of {len(recipes)}{', for evaluation' if single.validation_only else ''}")
        prepared.append(prepare(single, out.parent / single.hash(), report=report, processes=processes))
    with atomic_folder(out, is_usable=lambda: _reusable(out, recipe) is not None) as folder:
        compose(recipe, prepared, folder)
    return PreparedData.load(out)


def _prepare_whole(recipe: DataRecipe, source: Source, parts: list[Part], folder: Path, report: Report) -> None:
    """Prepare a small source in this process."""
    try:
        plan, tokenizer, row_format = make_plan(recipe, source, parts, report)
        save_tokenizer(tokenizer, folder / TOKENIZER)
        record = PartPreparer(recipe, source, tokenizer, row_format).prepare(parts[0], folder, "", report)
    finally:
        stop_rendering()
    finish(plan, recipe, tokenizer, [record], folder, report)


def _prepare_parts(
    recipe: DataRecipe, source: Source, parts: list[Part], out: Path, report: Report, processes: int | None
) -> None:
    """Prepare a large source part by part, in several processes, without the parts that are done."""
    store = ShardStore(out)
    plan = parse_plan(store.read(PLAN))
    if plan is None or plan.recipe_hash != recipe.hash() or plan.versions != package_versions(recipe.data):
        try:
            plan, tokenizer, _ = make_plan(recipe, source, parts, report)
        finally:
            stop_rendering()
        with atomic_folder(out, is_usable=lambda: False) as folder:
            save_tokenizer(tokenizer, folder / TOKENIZER)
            ShardStore(folder).write(PLAN, plan.to_json())
    prepare_parts(plan, out / TOKENIZER, store, range(len(plan.parts)), report=report, processes=processes)
    records = [read_record(store, number) for number in range(len(plan.parts))]
    tokenizer = AutoTokenizer.from_pretrained(str(out / TOKENIZER), trust_remote_code=False)
    finish(plan, recipe, tokenizer, records, out, report)


def finish(
    plan: Plan,
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    records: list[PartRecord],
    folder: Path,
    report: Report,
) -> None:
    """Write the samples and the manifest of prepared parts, and report what they have.

    Raises ValueError when no sample is usable.
    """
    whole = in_all(records)
    counts = whole.counts
    if not counts.used:
        raise ValueError(f"data.source {plan.source!r}: nothing is left to train on; {counts}")
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
        versions=plan.versions,
    )
    assert manifest.samples_read == manifest.samples_used + sum(manifest.skipped.values())
    manifest.write(folder)
    report(f"{plan.source}: {counts}")
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
    rows = f"{split.rows:,} rows"
    if manifest.packing:
        rows += f" of {manifest.sequence_length} tokens, {100 * split.fill(manifest.sequence_length):.1f} % full"
    return f"{name}: {split.samples:,} samples, {split.tokens:,} tokens, {split.target_tokens:,} with loss, in {rows}"
