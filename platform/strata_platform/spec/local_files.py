"""Files and folders of this machine that a spec names: whether they exist, before a run is started for them.

The models of a spec read no disk, because a run on a cluster has the files of its pods. So this is a step of its own.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from strata_platform.errors import Place, Problem, SpecError
from strata_platform.file_io import require_regular_file
from strata_platform.run_layout import RunLayout
from strata_platform.spec.describe import closest_match, format_value
from strata_platform.spec.named_weights import named_weights
from strata_platform.spec.run_spec import RunSpec
from strata_platform.spec.sections.data import DATA_SUFFIXES, Data, Reading, is_template_file
from strata_platform.spec.stages import stage_problems

_PATH_BEGINNINGS = ("/", "./", "../", "~")
# Paths are shown whole.
_WIDTH = 4096


def require_local_files(spec: RunSpec) -> None:
    """Raises SpecError, which lists every file and folder that `spec` names and this machine lacks."""
    if problems := list(_problems(spec)):
        raise SpecError(problems)


def missing_local_files(spec: RunSpec, source: str, places: Mapping[str, Place]) -> SpecError | None:
    """The error that `require_local_files` raises, with the lines of the file `source` that `spec` was read from."""
    problems = list(_problems(spec))
    return SpecError(problems).with_places(source, places) if problems else None


def _problems(spec: RunSpec) -> Iterator[Problem]:
    """A problem for each file or folder that `spec` names and this machine lacks; also for an `output` that is a file,
    and for the models of stages.

    Names that may be those of a repository on the Hub are left to the run.
    """
    data = spec.data
    for field, name in _named_sources(data):
        if "://" not in name and (name.lower().endswith(DATA_SUFFIXES) or name.startswith(_PATH_BEGINNINGS)):
            yield from _missing_data(field, name)
    if data.chat_template is not None and data.chat_template.endswith(".jinja"):
        yield from _missing_file("data.chat_template", data.chat_template)
    for path, section in _sections(data):
        # Sources have that of `data` by default.
        template = section.template if path == "data" or section.template != data.template else None
        if template is not None and is_template_file(template):
            yield from _missing_file(f"{path}.template", template)
    for index, task in enumerate(spec.evaluation.tasks):
        if task.endswith((".yaml", ".yml")):
            yield from _missing_file(f"evaluation.tasks[{index}]", task)
    folders: dict[str, str | None] = {"model.name": spec.model.name, "model.tokenizer": spec.model.tokenizer}
    folders |= {weights.field: weights.name for weights in named_weights(spec)}
    if _may_continue(spec):
        # The first start alone reads it.
        folders.pop("adapter.init_from", None)
    for field, folder in folders.items():
        if folder is not None and folder.startswith(_PATH_BEGINNINGS) and not os.path.isdir(folder):
            yield _missing(field, folder, "there is no such folder on this machine")
    yield from stage_problems(spec)
    yield from _file_in_place_of_output(spec.output)


def _named_sources(data: Data) -> Iterator[tuple[str, str]]:
    """The field and the name of each source."""
    for path, section in _sections(data):
        names = section.source
        if isinstance(names, str):
            yield f"{path}.source", names
        else:
            yield from ((f"{path}.source[{index}]", name) for index, name in enumerate(names or ()))


def _sections(data: Data) -> Iterator[tuple[str, Reading]]:
    """The path and the section of each source."""
    sections: list[tuple[str, Reading | None]] = [("data", data), ("data.validation_source", data.validation_source)]
    for index, source in enumerate(data.sources):
        path = f"data.sources[{index}]"
        sections += [(path, source), (f"{path}.validation_source", source.validation_source)]
    yield from ((path, section) for path, section in sections if section is not None)


def _missing_data(field: str, name: str) -> Iterator[Problem]:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return
    if any(character in name for character in "*?[") and not os.path.exists(path):
        if next(glob.iglob(path, recursive=True), None) is None:
            yield Problem(field, "matches no file on this machine", format_value(name, _WIDTH))
    else:
        yield from _missing_file(field, name)


def _missing_file(field: str, name: str) -> Iterator[Problem]:
    try:
        require_regular_file(Path(name).expanduser())
    except FileNotFoundError:
        yield _missing(field, name, "there is no such file on this machine")
    except OSError as error:
        yield Problem(field, f"cannot be read: {error.strerror}", format_value(name, _WIDTH))


def _may_continue(spec: RunSpec) -> bool:
    """Whether the run may have a checkpoint to continue with."""
    checkpoints = RunLayout(Path(spec.output, spec.name)).checkpoints
    return spec.checkpoint.url is not None or any(checkpoints.glob("*"))


def _missing(field: str, name: str, message: str) -> Problem:
    folder, _, last = os.path.expanduser(name).rstrip("/").rpartition("/")
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    return Problem(field, message, format_value(name, _WIDTH), suggestion=closest_match(last, beside))


def _file_in_place_of_output(output: str) -> Iterator[Problem]:
    """A problem if `output`, or a folder above it, is a file."""
    for folder in (Path(output), *Path(output).parents):
        if os.path.lexists(folder):
            if not os.path.isdir(folder):
                yield Problem("output", f"{folder} is a file, not a folder; give another path, or move it away")
            return
