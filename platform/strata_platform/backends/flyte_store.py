"""Files that tasks returned, in Flyte's object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_platform.backends.flyte_config import FlyteConfig
from strata_platform.errors import Refused, Unreachable
from strata_platform.file_io import open_store


class FlyteStore:
    """Reads files of the store with this machine's own access, or with the keys of Flyte's configuration."""

    def __init__(self, config: FlyteConfig) -> None:
        self._config = config

    def read(self, url: str) -> bytes:
        """The content of a file. Raises FileNotFoundError, Refused, and Unreachable."""
        try:
            files, path = self.open(url)
            content: bytes = files.cat_file(path)
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise Refused(f"the object store refused to give {url}: {error}") from error
        # Each store's client has exceptions of its own, with no base in common.
        except Exception as error:
            raise Unreachable(f"the object store did not give {url}: {error}") from error
        return content

    def copy(self, url: str, to: Path, *, folder: bool) -> None:
        """Copy a file, or a folder with all that is in it."""
        files, path = self.open(url)
        if folder:
            files.get(f"{path.rstrip('/')}/", f"{to}/", recursive=True)
        else:
            files.get_file(path, str(to))

    def open(self, url: str) -> tuple[Any, str]:
        """The store's client, and the path in it."""
        options: dict[str, Any] = {}
        if url.startswith("s3:"):
            config = self._config
            given = {"key": config.store_key, "secret": config.store_secret}
            options = {name: value for name, value in given.items() if value}
            if config.store_endpoint:
                options["client_kwargs"] = {"endpoint_url": config.store_endpoint}
        return open_store(url, **options)
