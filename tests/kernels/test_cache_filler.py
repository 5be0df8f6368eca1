"""The cache filler: entries come from the cache, an image or the store, and no store can stop a run."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton
from triton.runtime.cache import get_cache_manager

from strata_kernels.warmup import count_compiles, triton_cache
from strata_kernels.warmup.blob_storage import Blob, FolderStorage, open_storage
from strata_kernels.warmup.cache_filler import CacheFiller
from strata_kernels.warmup.store import Store
from strata_kernels.warmup.time_budget import CircuitBreaker
from tests.kernels.helpers.cache_entries import elf, kernel_entry
from tests.kernels.helpers.store_races import Driver, Pointer, compile_made_up, copy_kernel, hex_of, look_up
from tests.kernels.helpers.stores import ENTRIES, FILES, KEY, SECRET, archives, signed

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter has no cache")


def warm(filler: CacheFiller) -> dict[str, str]:
    """Look up every entry as Triton does; returns the origin of each."""
    with filler.installed():
        for key, files in ENTRIES:
            manager = get_cache_manager(hex_of(key))
            if look_up(manager, files) is None:
                compile_made_up(manager, files)
            assert look_up(manager, files) == {n: d for n, d in files.items() if not n.startswith(triton_cache.GROUP)}
    filler.push()
    return {key: filler._origins[key] for key, _ in ENTRIES}


@pytest.fixture
def pod(tmp_path, monkeypatch) -> Path:
    """The cache directory of a pod."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_image_comes_before_the_store_and_the_compiler_last(tmp_path, pod):
    (in_cache, in_image, in_both, in_store, nowhere) = (key for key, _ in ENTRIES)
    files = dict(ENTRIES)
    triton_cache.store(pod, in_cache, files[in_cache])
    for key in (in_image, in_both):
        triton_cache.store(tmp_path / "image", key, files[key])
    for key in (in_both, in_store):
        signed(tmp_path / "store").push(key, files[key])
    filler = CacheFiller(pod, [tmp_path / "none", tmp_path / "image"], signed(tmp_path / "store"))
    assert warm(filler) == dict(zip(files, ("cache", "image", "image", "store", "compiled"), strict=True))
    assert filler.pushed == 1 and not filler.problems and "unwritable" not in filler.to_dict()
    assert signed(tmp_path / "store").pull(nowhere) == files[nowhere]
    assert set(warm(CacheFiller(pod)).values()) == {"cache"}


def test_a_corrupt_entry_comes_from_another_source_and_is_reported(tmp_path, pod):
    for root in (pod, tmp_path / "image"):
        triton_cache.store(root, KEY, FILES)
        (root / KEY / "kernel_0.cubin").write_bytes(b"\x7fELF")
    signed(tmp_path / "store").push(KEY, FILES)
    filler = CacheFiller(pod, [tmp_path / "image"], signed(tmp_path / "store"))
    assert warm(filler)[KEY] == "store"
    assert filler.problems == [
        f"{root / KEY}: kernel_0.cubin does not match its digest" for root in (pod, tmp_path / "image")
    ]


def test_a_truncated_archive_is_rejected_and_replaced(tmp_path, pod):
    signed(tmp_path / "store").push(KEY, FILES)
    (torn,) = archives(tmp_path / "store")
    torn.write_bytes(torn.read_bytes()[:100])
    filler = CacheFiller(pod, store=signed(tmp_path / "store"))
    assert warm(filler)[KEY] == "compiled"
    name = torn.relative_to(tmp_path / "store")
    assert filler.problems == [f"the store's archive {name} is rejected: its SHA-256 differs from the one in its name"]
    assert signed(tmp_path / "store").pull(KEY) == FILES


def test_concurrent_builds_of_one_helper_leave_a_valid_one(pod):
    """Every thread that needs the driver's helper first builds it, and a C compiler's outputs differ."""
    key, files = ENTRIES[-1]
    (name,) = files
    filler = CacheFiller(pod)
    with filler.installed(), ThreadPoolExecutor(8) as threads:
        managers = list(threads.map(lambda _: get_cache_manager(hex_of(key)), range(8)))
        builds = [elf(bytes([i]) * 5000) for i in range(8)]
        paths = set(threads.map(lambda both: both[0].put(both[1], name), zip(managers, builds, strict=True)))
    assert paths == {str(pod / key / name)}
    loaded = triton_cache.load(pod, key)
    assert loaded is not None and loaded[name] in builds


def test_an_entry_that_another_pod_has_repaired_meanwhile_stays(pod, monkeypatch):
    """It loads its launcher by the path that it has just written."""
    key, files = ENTRIES[-1]
    (name,) = files
    triton_cache.store(pod, key, files)
    (pod / key / name).write_bytes(files[name][:-1])
    invalidate = triton_cache.invalidate

    def after_another_pod(directory, key):
        triton_cache.store(directory, key, files)
        invalidate(directory, key)

    monkeypatch.setattr(triton_cache, "invalidate", after_another_pod)
    with CacheFiller(pod).installed():
        get_cache_manager(hex_of(key))
    assert (pod / key / name).read_bytes() == files[name]


def test_one_process_at_a_time_changes_an_entry(pod, monkeypatch):
    key, files = ENTRIES[-1]
    (name,) = files
    locked = []
    replace = triton_cache.write_atomically

    def noting(path, data):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(False)
        except BlockingIOError:
            locked.append(True)
        finally:
            os.close(folder)
        replace(path, data)

    monkeypatch.setattr(triton_cache, "write_atomically", noting)
    with CacheFiller(pod).installed():
        get_cache_manager(hex_of(key)).put(files[name], name)
    triton_cache.store(pod, *kernel_entry(0))
    assert len(locked) == 1 + 5 and all(locked)


def test_a_moved_cache_is_relocated_where_it_lies(tmp_path, pod):
    for key, files in ENTRIES:
        triton_cache.store(tmp_path / "before", key, files)
    (tmp_path / "before").rename(pod)
    assert set(warm(CacheFiller(pod)).values()) == {"cache"}


def test_triton_hits_what_another_pod_has_compiled(tmp_path, monkeypatch):
    """With the real compiler, for an H200 that is not here."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())

    def start(pod: str) -> dict[str, int]:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / pod))
        copy_kernel.device_caches.clear()
        filler = CacheFiller(tmp_path / pod, store=signed(tmp_path / "store"))
        with filler.installed(), count_compiles() as compiles:
            for width in (16, 32):
                copy_kernel.warmup(Pointer, Pointer, D=width, enable_fp_fusion=True, grid=(1,))
        filler.push()
        assert sorted(kernel.values["D"] for kernel in filler.kernels) == ["16", "32"]
        assert compiles.count == filler.counts()["compiled"] == filler.pushed
        return filler.counts()

    assert start("first") == {"cache": 0, "image": 0, "store": 0, "compiled": 2}
    assert start("second") == {"cache": 0, "image": 0, "store": 2, "compiled": 0}
    torn = archives(tmp_path / "store")[0]
    torn.write_bytes(torn.read_bytes()[:-1])
    assert start("third") == {"cache": 0, "image": 0, "store": 1, "compiled": 1}
    assert start("fourth") == {"cache": 0, "image": 0, "store": 2, "compiled": 0}
    assert start("fourth") == {"cache": 2, "image": 0, "store": 0, "compiled": 0}


def test_a_store_that_never_answers_costs_no_more_than_its_time_budget(tmp_path, pod, s3, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        slow = Store(open_storage(s3), "triton/python", signing_key=SECRET)
        filler = CacheFiller(pod, store=slow, breaker=CircuitBreaker(0.5))
        assert set(warm(filler).values()) == {"compiled"}
    assert filler.problems == ["could not read the store, so it is not used again: no answer within 0.5 s in all"]
    # The client itself would wait for minutes.
    assert 0.4 < filler.to_dict()["store_seconds"] < 30


def test_a_store_is_opened_by_its_own_client_where_a_library_has_registered_another(s3):
    """As the SDK of Flyte 2 does when it is imported."""
    code = (
        "from obstore.fsspec import register; register('s3')\n"
        "from strata_kernels.warmup.blob_storage import open_storage\n"
        f"print(type(open_storage({s3!r})._fs).__module__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], text=True, capture_output=True)
    assert done.stdout.split() == ["s3fs.core"], done.stderr


def test_an_unreachable_store_is_called_once(tmp_path, pod):
    class Gone(FolderStorage):
        asked = 0

        def list(self, prefix: str) -> list[Blob]:
            Gone.asked += 1
            # What a mount whose server is gone answers.
            raise OSError(116, "Stale file handle")

    filler = CacheFiller(pod, store=Store(Gone(tmp_path), "triton/python", signing_key=SECRET))
    assert set(warm(filler).values()) == {"compiled"} and Gone.asked == 1
    assert "OSError: [Errno 116] Stale file handle" in filler.problems[0]


def test_a_full_disk_is_reported(tmp_path, pod):
    """A limit on the size of files stands for it: writing fails in the same place."""
    triton_cache.store(tmp_path / "image", *kernel_entry(0, size=200_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        filler = CacheFiller(pod, [tmp_path / "image"])
        assert warm(filler)[KEY] == "compiled"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in filler.to_dict()["unwritable"]


def test_races_with_kills_and_torn_files():
    """A few of the races that `helpers/store_races.py` runs by the thousand, two with Triton's compiler."""
    command = [sys.executable, "-m", "tests.kernels.helpers.store_races", "--races", "12", "--real", "1", "--seed", "4"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
