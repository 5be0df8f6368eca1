"""Upstream's own flyte-binary in the cluster of `local_cluster`, in place of the stand-in for flyteadmin.

STRATA_FLYTE is that program, built of Flyte's sources without cgo: flyteadmin and its scheduler, datacatalog, propeller
and the pod webhook in one. It keeps its state in a PostgreSQL of this machine, whose programs have to be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = os.environ.get("STRATA_FLYTE", "")
IMAGE = "flyte-upstream"
# PostgreSQL refuses to be root.
_USER = "postgres"
_PASSWORD = "in-the-tests"


def pack(scripts: Path, images: Path) -> None:
    """An image of the program, as the scripts make theirs."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        (Path(root) / "tmp").mkdir(mode=0o777)
        (Path(root) / "tmp").chmod(0o1777)
        shutil.copy2(PROGRAM, Path(root) / "flyte")
        made = [f"registry.local/{IMAGE}:1", str(images / f"{IMAGE}.tar"), "65532", "/flyte"]
        subprocess.run(["python3", str(scripts / "mkimage.py"), root, *made], check=True)


def configure(flyte: dict[str, Any], host: str) -> None:
    """Change the values of its chart from the stand-in's: a database, and all that the stand-in does not have."""
    database = {"host": host, "port": 5432, "username": _USER, "password": _PASSWORD, "dbname": "flyte"}
    flyte["configuration"]["database"] = database | {"options": "sslmode=disable"}
    del flyte["configuration"]["inline"]["catalog-cache"]
    flyte["flyte-core-components"]["admin"]["disableScheduler"] = False
    flyte["deployment"]["image"]["repository"] = f"registry.local/{IMAGE}"
    del flyte["deployment"]["extraEnvVars"]


def start_database(run: Callable[..., object], folder: Path, host: str) -> None:
    """An empty PostgreSQL that listens at `host`, where `run` runs commands, until `stop_database`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.chown(folder, _USER, _USER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_PASSWORD)
        file.flush()
        shutil.chown(file.name, _USER)
        run(*_as_user("initdb"), "-D", str(folder), "-U", _USER, "-A", "scram-sha-256", "--pwfile", file.name)
    with (folder / "pg_hba.conf").open("a") as rules:
        rules.write("host all all all scram-sha-256\n")
    options = f"-c listen_addresses={host} -c unix_socket_directories={folder}"
    run(*_as_user("pg_ctl"), "-D", str(folder), "-l", str(folder / "log"), "-w", "-o", options, "start")


def stop_database(run: Callable[..., object], folder: Path) -> None:
    """End it, where there is one, also one that a killed process left."""
    try:
        if (folder / "postmaster.pid").exists():
            run(*_as_user("pg_ctl"), "-D", str(folder), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_user(program: str) -> list[str]:
    # Debian keeps PostgreSQL's programs out of the PATH.
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *os.get_exec_path()]
    found = shutil.which(program, path=os.pathsep.join(map(str, places)))
    if found is None:
        raise FileNotFoundError(f"STRATA_FLYTE needs PostgreSQL, and {program} is not here")
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--", found]
