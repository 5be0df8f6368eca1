"""Run the checks of the plan, and remember in the output folder that they passed.

They build models on the meta device, so they need torch and transformers: seconds of imports, in a pod that the
rest of the run waits for. A run like one that has passed them, with the same packages and code, is not checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strata_platform.file_io import folder_digest, write_atomic
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import PRESETS
from tasks.runtime.preflight import run_checks

log = logging.getLogger(__name__)

# What no check of the plan reads. Every other field counts, also those that none reads today.
_UNREAD: dict[str, Any] = {"name": True, "seed": True, "optimizer": {"lr"}, "training": {"steps", "epochs"}}
# Objectives that name no further model and no code of the user's.
_PLAIN = ("pretrain", "sft", "dpo", "kto", "orpo", "simpo", "cpo", "reward")
_CODE = ("tasks", "strata_kernels", "strata_platform")


class _Warnings(logging.Handler):
    """Keeps what the checks warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def check_plan(spec: RunSpec, *, local: bool) -> None:
    """Run the checks unless they have passed for such a run; then repeat their warnings. Raises ValueError.

    local: whether all steps run on this machine, where what the checks load is needed anyway: they always run.
    """
    note = None if local else _note_of(spec)
    if note is not None and (warnings := _noted(note)) is not None:
        for text in warnings:
            log.warning("%s", text)
        return
    runtime, kept = logging.getLogger("tasks.runtime"), _Warnings()
    runtime.addHandler(kept)
    try:
        run_checks("plan", "spec", spec=spec)
    finally:
        runtime.removeHandler(kept)
    if note is None:
        return
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(note, json.dumps(kept.texts).encode(), durable=False)
    except OSError as error:
        # The output folder may be mounted in the pods of `resources.pod_template` alone.
        log.info("the next run like this one is checked again: %s", error)


def _noted(note: Path) -> list[str] | None:
    """The warnings in the note; None if it cannot be read, such as an empty file after a loss of power."""
    try:
        texts: list[str] = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return texts


def _note_of(spec: RunSpec) -> Path | None:
    """The file with the warnings of checks that passed. None where their outcome depends on more than the spec and what
    is installed: the Hub, or code and files that it names.
    """
    more = (
        spec.objective.type not in _PLAIN,
        spec.runtime.callbacks,
        spec.evaluation.tasks,
        ":" in spec.data.format,
        "gguf" in spec.export.formats,
        spec.model.trust_remote_code,
        spec.model.name not in PRESETS and not Path(spec.model.name).is_dir(),
    )
    if any(more):
        return None
    trackers = tuple(f"{name.upper()}_" for name in spec.tracking.report_to)
    parts = [
        spec.model_dump_json(exclude=_UNREAD),
        sys.version,
        *_files(Path(spec.model.name)),
        # The names alone: values are secrets.
        *sorted(name for name in os.environ if trackers and name.startswith(trackers)),
        *sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info")),
        *_code(),
    ]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Path(spec.output).absolute() / "data" / f"{key}.checked.json"


def _files(folder: Path) -> Iterator[str]:
    """What changes with the files of a model's folder; nothing for a preset."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not file.exists():
            continue  # A link to nothing, which caches of the Hub may have.
        found = file.stat()
        yield f"{file} {found.st_size} {found.st_mtime_ns}"


def _code() -> Iterator[str]:
    """Digests of the project's own code, which changes without its version while somebody works on it."""
    for package in _CODE:
        found = find_spec(package)
        assert found is not None
        for root in found.submodule_search_locations or ():
            yield f"{package} {folder_digest(Path(root))}"
