"""Data sources: the built-in pairs, files on disk or behind a URL, or a dataset of the Hugging Face Hub.

A source can be read repeatedly and gives the same rows in the same order each time.
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fsspec.implementations.local import LocalFileSystem

from strata_platform.file_io import require_regular_file
from strata_platform.redact import redacted
from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import BUILTIN_SOURCES, COMPRESSIONS, EXTENSIONS, Data
from tasks.runtime.data.reading import python_docs
from tasks.runtime.data.reading.dataset_card import (
    CARD,
    choose_configuration,
    files_of_configuration,
    is_below,
    read_configurations,
)
from tasks.runtime.data.reading.readers import extension, is_text, naming_file, read
from tasks.runtime.data.reading.rows import Row, suggestion
from tasks.runtime.data.reading.splits import (
    abbreviate,
    files_of_split,
    is_data_file,
    is_hidden,
    is_hidden_from,
    split_name,
)
from tasks.runtime.data.reading.text_files import WHOLE_FILES, TextDocuments
from tasks.runtime.process.hub import asking_hub
from tasks.runtime.process.object_store_url import url_to_fs

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
# Seconds that the Hub has to name a commit; its client would wait forever.
COMMIT_TIMEOUT = 30.0
# In a folder of rows with columns, files that describe them.
_DOCUMENTATION = (".md", ".rst")
# fsspec's names for metadata that changes with a file's content; each file system has others.
_VERSION_FIELDS = (
    "size", "ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "modified", "created", "md5Hash",
    "Content-MD5", "Digest", "VersionId", "version_id", "blob_id", "sha",
)  # fmt: skip


class Source(Protocol):
    """A named source of rows with a digest of its content."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the log, such as which files of a folder are read."""

    def rows(self) -> Iterator[Row]:
        """All rows, in the same order every time."""

    def digest(self) -> str:
        """SHA-256 that changes when the rows change."""


def open_source(recipe: DataRecipe) -> Source:
    """Open the source that `data.source` names.

    Raises:
        ValueError: the source is not found, or its files have different formats.
    """
    data = recipe.data
    names = data.names
    if len(names) == 1 and names[0] in BUILTIN_SOURCES:
        _warn_of_hub_fields(data)
        _warn_of_text_fields(data)
        return PythonDocs(seed=recipe.seed)
    if all(_names_files(name) for name in names):
        files = Files.find(names, data.split, TextDocuments(data.documents, data.document_separator), data.subset)
        _warn_of_hub_fields(data, split=not files.splits, subset=not files.configured)
        if not any(is_text(path) for _, path in files.found):
            _warn_of_text_fields(data)
        return files
    _warn_of_text_fields(data)
    if len(names) == 1 and _HUB_ID.match(names[0]):
        return HubDataset(names[0], data.subset, data.split, data.revision)
    raise _not_found(next(name for name in names if not _names_files(name)), len(names))


@dataclass(frozen=True)
class PythonDocs:
    """The built-in dataset: docstrings of Python's standard library, shuffled with the seed; see `python_docs`."""

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
        """Digest of Python's version and the source of its library."""
        return python_docs.digest()


@dataclass(frozen=True)
class Files:
    """Files of one format, or of text; read in the order of the list, and the matches of a glob sorted."""

    name: str
    found: tuple[tuple[Any, str], ...]  # file system, path within it
    notes: tuple[str, ...] = ()
    splits: bool = False
    """Whether the files' names contain splits."""
    texts: TextDocuments = WHOLE_FILES
    """What a document is in a text file."""
    configured: bool = False
    """Whether the card of a folder lists configurations."""

    @classmethod
    def find(cls, names: tuple[str, ...], split: str, texts: TextDocuments, subset: str | None = None) -> Files:
        """Resolve paths, folders, globs and URLs. Of a folder whose file names contain splits, take those of `split`;
        of one whose card lists configurations, those of `subset`.

        Raises ValueError when a name matches nothing or no regular file, or when files have different formats.
        """
        matches = [_find_files(name, split, subset) for name in names]
        found = [(match.filesystem, path) for match in matches for path in match.paths]
        again = [
            path for (_, path), times in Counter((str(f.protocol), path) for f, path in found).items() if times > 1
        ]
        if again:
            raise ValueError(
                f"data.source names {again[0]} twice; name it once, or draw more of it by a weight in data.sources"
            )
        kinds = {"text" if is_text(path) else extension(path): path for _, path in found}
        if unknown := [path for _, path in found if extension(path) not in EXTENSIONS]:
            raise ValueError(
                f"data.source: cannot tell the format of {unknown[0]}; known are {', '.join(EXTENSIONS)}, "
                f"plain or compressed ({', '.join(COMPRESSIONS)})"
            )
        if len(kinds) > 1:
            raise ValueError(
                "data.source mixes files of different formats: "
                + ", ".join(f"{suffix} ({path})" for suffix, path in kinds.items())
                + "; give files of one format"
            )
        for filesystem, path in found:
            if isinstance(filesystem, LocalFileSystem):
                with naming_file(path):
                    require_regular_file(Path(path))
        notes = tuple(match.note for match in matches if match.note)
        return cls(
            redacted(", ".join(names)),
            tuple(found),
            notes,
            any(match.splits for match in matches),
            texts,
            any(match.configured for match in matches),
        )

    def rows(self) -> Iterator[Row]:
        """Rows of all files. Raises ValueError, which names the file, when one cannot be read."""
        for filesystem, path in self.found:
            yield from read(filesystem, path, self.texts)

    def digest(self) -> str:
        """Digest of the contents of local files, and of size, ETag and time of remote files."""
        result = hashlib.sha256()
        for filesystem, path in self.found:
            with naming_file(path):
                result.update(f"\0{path.rsplit('/', 1)[-1]}\0{_file_version(filesystem, path)}".encode())
        return result.hexdigest()


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hub, streamed: its files are not stored. Runs none of its code."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Rows of the split.

        Raises ValueError when the Hub has no such dataset, subset or split, and Unreachable when it does not answer.
        """
        # Around the iteration, too: a stream requests its rows one by one.
        with asking_hub(f"data.source {self.name!r}"):
            for number, values in enumerate(self._load(), start=1):
                yield Row(f"{self.name} row {number}", dict(values))

    def _load(self) -> Any:
        try:
            import datasets
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise ValueError(
                f"data.source {self.name!r} is on the Hub and needs the package `datasets`: pip install datasets"
            ) from error
        try:
            found = datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self.revision, streaming=True
            )
        # HfHubHTTPError: an invalid token, for example.
        except (FileNotFoundError, ConnectionError, HfHubHTTPError) as error:
            raise _not_found(self.name, reason=str(error).splitlines()[0]) from error
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise ValueError(
                f"data.source {self.name!r}: {error}; set data.revision to 'refs/convert/parquet', where the Hub has "
                "the rows of many such datasets, or download its files and name these"
            ) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:
            # The library's message lists the configurations or splits that exist.
            raise ValueError(
                f"data.source {self.name!r} with data.subset {self.subset!r}, data.split {self.split!r}: {error}"
            ) from error
        return _without_decoding(found)

    def commit(self) -> str | None:
        """The commit that `revision` resolves to now; None, with a warning, when the Hub does not answer."""
        from huggingface_hub import HfApi

        if self.revision is not None and is_commit(self.revision):
            return self.revision
        try:
            return HfApi().dataset_info(self.name, revision=self.revision, timeout=COMMIT_TIMEOUT).sha
        # The client's errors have no common base class.
        except Exception as error:
            warnings.warn(
                f"data.revision: the Hub did not return the commit of {self.name!r} ({type(error).__name__}), so a "
                "change of the dataset is not noticed until it is read. Pin data.revision to a commit.",
                stacklevel=2,
            )
            return None

    def digest(self) -> str:
        """Digest of the name and the commit."""
        return hashlib.sha256(f"{self.name}@{self.commit()}".encode()).hexdigest()


def _without_decoding(rows: Any) -> Any:
    """The dataset with images and audio left encoded: decoding takes time and further packages."""
    from datasets import IterableDataset
    from datasets.features.features import require_decoding

    # A stream may not know its columns before it is read; then its files are JSON or text.
    if not rows.features or not require_decoding(rows.features):
        return rows
    return (rows if isinstance(rows, IterableDataset) else rows.to_iterable_dataset()).decode(False)


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit hash rather than a branch or a tag, which can move."""
    return _COMMIT.match(revision) is not None


def _warn_of_hub_fields(data: Data, *, split: bool = True, subset: bool = True) -> None:
    """Warn of fields that have no effect outside the Hub. split, subset: whether these are among them."""
    fields = {
        "subset": data.subset if subset else None,
        "split": data.split if split else None,
        "revision": data.revision,
    }
    for name, value in fields.items():
        if value not in (None, "train"):
            warnings.warn(
                f"data.{name} {value!r} has no effect: data.source {data.source!r} is not on the Hub", stacklevel=3
            )


def _warn_of_text_fields(data: Data) -> None:
    """Warn of fields that have no effect without text files."""
    for name, value, default in (
        ("documents", data.documents, "file"),
        ("document_separator", data.document_separator, None),
    ):
        if value != default:
            warnings.warn(
                f"data.{name} {value!r} has no effect: data.source {data.source!r} has no text files", stacklevel=3
            )


def _names_files(name: str) -> bool:
    return "://" in name or extension(name) in EXTENSIONS or _is_pattern(name) or _local_path(name).exists()


def _is_pattern(name: str) -> bool:
    # In a URL, a question mark begins the query.
    return (
        any(c in name for c in "*[")
        if "://" in name
        else any(c in name for c in "*?[") and not _local_path(name).exists()
    )


def _local_path(name: str) -> Path:
    return Path(os.path.expanduser(name))


class _Match(NamedTuple):
    """Files that one name in `data.source` matches."""

    filesystem: Any
    paths: list[str]
    note: str = ""
    splits: bool = False
    configured: bool = False


def _find_files(name: str, split: str, subset: str | None) -> _Match:
    try:
        filesystem, path = url_to_fs(name if "://" in name else str(_local_path(name).absolute()))
        if _is_pattern(name):
            match = _find_by_pattern(filesystem, _pattern(filesystem, path))
        # No `isdir` over HTTP: it would download the whole file.
        elif not name.startswith(("http://", "https://")) and filesystem.isdir(path):
            return _find_in_folder(filesystem, path, name, split, subset)
        else:
            match = _Match(filesystem, [path] if filesystem.exists(path) else [])
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"data.source {name!r}: {error}") from error
    # The stores' clients raise errors without a common base class.
    except Exception as error:
        raise ValueError(
            f"data.source {name!r} cannot be read: {type(error).__name__}: {error}; check the credentials and "
            "endpoints in the environment"
        ) from error
    if not match.paths:
        raise _not_found(name)
    return match


def _find_by_pattern(filesystem: Any, pattern: str) -> _Match:
    """The files that a glob matches, without hidden ones. Raises ValueError if it matches only these."""
    found = sorted(filesystem.glob(pattern))
    paths = [path for path in found if not is_hidden_from(pattern, path)]
    hidden = redacted(abbreviate([path for path in found if is_hidden_from(pattern, path)]))
    if hidden and not paths:
        raise ValueError(
            f"it matches only hidden files: {hidden}; name them, or begin a part of the glob as their names do"
        )
    return _Match(filesystem, paths, note=f"skips hidden files: {hidden}" if hidden else "")


def _find_in_folder(filesystem: Any, folder: str, name: str, split: str, subset: str | None) -> _Match:
    """The data files of a folder. Raises ValueError when it has none, or none of this split or configuration."""
    files = {posixpath.relpath(path, folder): path for path in sorted(filesystem.find(folder))}
    shown = [path for path in files if is_data_file(path)]
    listed = read_configurations(filesystem, folder)
    if subset is not None and not listed:
        raise ValueError(
            f"data.subset is {subset!r}, but the folder has no {CARD} that lists configurations; remove data.subset "
            "and name the folder or the files to train on"
        )
    configuration = choose_configuration(listed, subset) if listed else None
    if configuration is not None and configuration.files is None:
        shown = [path for path in shown if is_below(path, configuration.folder)]
    known = [path for path in shown if extension(path) in EXTENSIONS]
    if not known:
        raise ValueError(f"the folder has no file of a known format ({', '.join(EXTENSIONS)})")
    # Beside rows with columns, a README is no data.
    rows = [path for path in known if extension(path) not in _DOCUMENTATION]
    known = rows if any(not is_text(path) for path in rows) else known
    if configuration is not None and configuration.files is not None:
        chosen = files_of_configuration(configuration, known, split)
    else:
        chosen = files_of_split(known, split, redacted(name))
    others = sorted(set(known) - set(chosen))
    left_out = f", of split {split!r}; left out: {abbreviate(others)}" if others else ""
    if configuration is not None:
        left_out = f", of configuration {configuration.name!r} in {CARD}{left_out}"
    for suffix in sorted({extension(path) for path in set(shown) - set(known)}):
        skipped = [path for path in shown if extension(path) == suffix and path not in known]
        left_out += f"; not read, {suffix or 'no extension'}: {abbreviate(skipped)}"
    if hidden := [path for path in files if is_hidden(path) and extension(path) in EXTENSIONS]:
        left_out += f"; not read, hidden: {abbreviate(hidden)}"
    return _Match(
        filesystem,
        [files[path] for path in chosen],
        note=f"reads {abbreviate(chosen)}{left_out}",
        splits=configuration is not None or split_name(chosen[0]) is not None,
        configured=configuration is not None,
    )


def _pattern(filesystem: Any, path: str) -> str:
    """The path as a glob. On disk, leading folders that exist under their literal name are escaped."""
    if not isinstance(filesystem, LocalFileSystem):
        return path
    folder = path
    while folder and not os.path.exists(folder):
        folder = folder.rpartition("/")[0]
    return glob.escape(folder) + path.removeprefix(folder)


def _file_version(filesystem: Any, path: str) -> str:
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
