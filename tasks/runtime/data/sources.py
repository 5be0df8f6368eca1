"""Where rows come from: the built-in pairs, files on disk or behind a URL, or a data set of the Hugging Face Hub.

A source can be read any number of times and gives the same rows in the same order each time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import posixpath
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from strata_platform.redact import redacted
from strata_platform.spec import DataRecipe
from strata_platform.spec.data import BUILTIN_SOURCES, Data
from tasks.runtime.data import python_docs
from tasks.runtime.data.readers import COMPRESSIONS, READERS, extension, naming_file, read
from tasks.runtime.data.rows import Row, suggestion
from tasks.runtime.data.splits import abbreviate, files_of_split, is_data_file, split_name
from tasks.runtime.process.hub import asking_hub

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
# What file systems call the fields that change when a file does.
_VERSION_FIELDS = (
    "size", "ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "modified", "created", "md5Hash",
    "Content-MD5", "Digest", "VersionId", "version_id", "blob_id", "sha",
)  # fmt: skip


class Source(Protocol):
    """Rows, their name, and a digest that changes when they do."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person is told of what is read."""

    def rows(self) -> Iterator[Row]:
        """All rows, in the same order every time."""

    def digest(self) -> str:
        """SHA-256 that changes with the rows."""


def open_source(recipe: DataRecipe) -> Source:
    """The source that `data.source` names.

    Raises:
        ValueError: nothing is found under that name, or the files are of several kinds.
    """
    data = recipe.data
    names = (data.source,) if isinstance(data.source, str) else data.source
    if len(names) == 1 and names[0] in BUILTIN_SOURCES:
        _warn_of_hub_fields(data)
        return PythonDocs(seed=recipe.seed)
    if all(_names_files(name) for name in names):
        files = Files.find(names, data.split)
        _warn_of_hub_fields(data, split=not files.splits)
        return files
    if len(names) == 1 and _HUB_ID.match(names[0]):
        return HubDataset(names[0], data.subset, data.split, data.revision, streaming=data.max_samples is not None)
    raise _not_found(next(name for name in names if not _names_files(name)), len(names))


@dataclass(frozen=True)
class PythonDocs:
    """The documented names of the standard library, shuffled by the seed; see `python_docs`."""

    seed: int
    name: str = "python-docs"
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Rows with `prompt` and `completion`."""
        pairs = list(python_docs.pairs())
        random.Random(self.seed).shuffle(pairs)  # noqa: S311  # order, not secrecy
        for number, (prompt, completion) in enumerate(pairs, start=1):
            yield Row(f"{self.name} pair {number}", {"prompt": prompt, "completion": completion})

    def digest(self) -> str:
        """Python's version and the library's source."""
        return python_docs.digest()


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after the other in the order of the list, globs sorted."""

    name: str
    found: tuple[tuple[Any, str], ...]  # file system, path within it
    notes: tuple[str, ...] = ()
    splits: bool = False
    """Whether names of files tell of splits."""

    @classmethod
    def find(cls, names: tuple[str, ...], split: str) -> Files:
        """Resolve paths, folders, globs and URLs; of a folder whose files name splits those of `split`.

        Raises ValueError when one matches nothing, or kinds are mixed.
        """
        matches = [_find_files(name, split) for name in names]
        found = [(match.filesystem, path) for match in matches for path in match.paths]
        kinds = {extension(path): path for _, path in found}
        if unknown := [path for suffix, path in kinds.items() if suffix not in READERS]:
            raise ValueError(
                f"data.source: cannot tell the format of {unknown[0]}; known are {', '.join(READERS)}, "
                f"plain or compressed ({', '.join(COMPRESSIONS)})"
            )
        if len(kinds) > 1:
            raise ValueError(
                "data.source mixes files of several kinds: "
                + ", ".join(f"{suffix} ({path})" for suffix, path in kinds.items())
                + "; give files of one kind"
            )
        notes = tuple(match.note for match in matches if match.note)
        return cls(redacted(", ".join(names)), tuple(found), notes, any(match.splits for match in matches))

    def rows(self) -> Iterator[Row]:
        """Rows of all files. Raises ValueError, naming the file, when one cannot be read."""
        for filesystem, path in self.found:
            yield from read(filesystem, path)

    def digest(self) -> str:
        """Contents of local files; of remote ones size, tag and time, as far as the server tells them."""
        result = hashlib.sha256()
        for filesystem, path in self.found:
            with naming_file(path):
                result.update(f"\0{path.rsplit('/', 1)[-1]}\0{_file_version(filesystem, path)}".encode())
        return result.hexdigest()


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hub, downloaded into its cache; streamed when only its first samples are asked for.

    No code of the data set is run.
    """

    name: str
    subset: str | None
    split: str
    revision: str | None
    streaming: bool
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Rows of the split.

        Raises ValueError when the Hub has no such data set, subset or split, and Unreachable when it does not answer.
        """
        # Also while rows are read: those of a stream come one by one.
        with asking_hub(f"data.source {self.name!r}"):
            for number, values in enumerate(self._load(), start=1):
                yield Row(f"{self.name} row {number}", dict(values))

    def _load(self) -> Any:
        try:
            import datasets
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise ValueError(
                f"data.source {self.name!r} is on the Hub, which takes the package `datasets`: pip install datasets"
            ) from error
        try:
            found = datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self.revision, streaming=self.streaming
            )
        # HfHubHTTPError: of a token that the Hub does not know, say.
        except (FileNotFoundError, ConnectionError, HfHubHTTPError) as error:
            raise _not_found(self.name, reason=str(error).splitlines()[0]) from error
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise ValueError(
                f"data.source {self.name!r}: {error}; set data.revision to 'refs/convert/parquet', where the Hub keeps "
                "the rows of many of these, or take its files"
            ) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:
            # The library's own words name the configurations or splits that there are.
            raise ValueError(
                f"data.source {self.name!r} with data.subset {self.subset!r}, data.split {self.split!r}: {error}"
            ) from error
        return _without_decoding(found)

    def commit(self) -> str | None:
        """The commit that `revision` stands for now; None, with a warning, when the Hub does not say."""
        from huggingface_hub import HfApi

        if self.revision is not None and is_commit(self.revision):
            return self.revision
        try:
            return HfApi().dataset_info(self.name, revision=self.revision).sha
        # What the Hub answers, and what keeps it from answering, have no common class but this.
        except Exception as error:
            warnings.warn(
                f"data.revision: cannot ask the Hub for the commit of {self.name!r} ({type(error).__name__}); a change "
                "there will not be noticed before the data is read. Pin data.revision to a commit.",
                stacklevel=2,
            )
            return None

    def digest(self) -> str:
        """That of the commit."""
        return hashlib.sha256(f"{self.name}@{self.commit()}".encode()).hexdigest()


def _without_decoding(rows: Any) -> Any:
    """Rows of a data set whose pictures and sounds stay as they are stored: to decode them takes time, and packages."""
    from datasets import IterableDataset
    from datasets.features.features import require_decoding

    # What is streamed may not know its columns before it is read; then they are of JSON or text.
    if not rows.features or not require_decoding(rows.features):
        return rows
    return (rows if isinstance(rows, IterableDataset) else rows.to_iterable_dataset()).decode(False)


def is_commit(revision: str) -> bool:
    """Whether a revision of the Hub is a commit, which stays what it is, and no branch or tag."""
    return _COMMIT.match(revision) is not None


def _warn_of_hub_fields(data: Data, *, split: bool = True) -> None:
    """`split`: also of that field."""
    fields = {"subset": data.subset, "split": data.split if split else None, "revision": data.revision}
    for name, value in fields.items():
        if value not in (None, "train"):
            warnings.warn(
                f"data.{name} {value!r} has no effect: data.source {data.source!r} is not on the Hub", stacklevel=3
            )


def _names_files(name: str) -> bool:
    return "://" in name or extension(name) in READERS or _is_pattern(name) or _local_path(name).exists()


def _is_pattern(name: str) -> bool:
    # In a URL a question mark begins the query.
    return (
        any(c in name for c in "*[")
        if "://" in name
        else any(c in name for c in "*?[") and not _local_path(name).exists()
    )


def _local_path(name: str) -> Path:
    return Path(os.path.expanduser(name))


class _Match(NamedTuple):
    """Files of one name in `data.source`."""

    filesystem: Any
    paths: list[str]
    note: str = ""
    splits: bool = False


def _find_files(name: str, split: str) -> _Match:
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(name if "://" in name else str(_local_path(name).absolute()))
        if _is_pattern(name):
            paths = sorted(filesystem.glob(_pattern(filesystem, path)))
        # A web server is not asked for a listing: it would answer with the whole file.
        elif not name.startswith(("http://", "https://")) and filesystem.isdir(path):
            return _find_in_folder(filesystem, path, name, split)
        else:
            paths = [path] if filesystem.exists(path) else []
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"data.source {name!r}: {error}") from error
    # A store's client raises errors of its own, of no common class.
    except Exception as error:
        raise ValueError(
            f"data.source {name!r} cannot be read: {type(error).__name__}: {error}; the client takes credentials and "
            "addresses from the environment"
        ) from error
    if not paths:
        raise _not_found(name)
    return _Match(filesystem, paths)


def _find_in_folder(filesystem: Any, folder: str, name: str, split: str) -> _Match:
    """Raises ValueError when nothing in the folder can be read, or names tell of splits and not of this one."""
    files = {posixpath.relpath(path, folder): path for path in sorted(filesystem.find(folder))}
    shown = [path for path in files if is_data_file(path)]
    known = [path for path in shown if extension(path) in READERS]
    if not known:
        raise ValueError(f"the folder holds no file of a known kind ({', '.join(READERS)})")
    chosen = files_of_split(known, split, redacted(name))
    others = sorted(set(known) - set(chosen))
    left_out = f", of split {split!r}; left out: {abbreviate(others)}" if others else ""
    if unknown := [path for path in shown if extension(path) not in READERS]:
        left_out += f"; of no known kind: {abbreviate(unknown)}"
    return _Match(
        filesystem,
        [files[path] for path in chosen],
        note=f"reads {abbreviate(chosen)}{left_out}",
        splits=split_name(chosen[0]) is not None,
    )


def _pattern(filesystem: Any, path: str) -> str:
    """The path as a pattern. On disk, folders that are there by the name as it is written are taken by that name."""
    from fsspec.implementations.local import LocalFileSystem

    if not isinstance(filesystem, LocalFileSystem):
        return path
    folder = path
    while folder and not os.path.exists(folder):
        folder = folder.rpartition("/")[0]
    return glob.escape(folder) + path.removeprefix(folder)


def _file_version(filesystem: Any, path: str) -> str:
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    info = filesystem.info(path)
    return json.dumps({field: str(info[field]) for field in _VERSION_FIELDS if field in info}, sort_keys=True)


def _not_found(name: str, of: int = 1, *, reason: str = "") -> ValueError:
    looked = [f"the built-in {', '.join(BUILTIN_SOURCES)}{' (not in a list)' if of > 1 else ''}"]
    near = suggestion(name, BUILTIN_SOURCES)
    if "://" in name:
        looked = ["that URL"]
    else:
        path = _local_path(name).absolute()
        looked.append(f"the file or folder {path}")
        if path.parent.is_dir():
            near = near or suggestion(path.name, os.listdir(path.parent))
    if reason:
        looked.append(f"the Hub ({reason})")
    return ValueError(f"data.source {name!r} was not found; looked for {', '.join(looked)}{near}")
