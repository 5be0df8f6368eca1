"""The store: what goes in comes out, what is torn, forged or foreign is refused, and no store can stop a run."""

import fcntl
import io
import os
import random
import resource
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton
from triton.runtime.cache import get_cache_manager

from strata_kernels.warmup import count_compiles, store, triton_cache
from strata_kernels.warmup.blob_storage import Blob, FolderStorage, open_storage
from strata_kernels.warmup.cache_filler import CacheFiller
from strata_kernels.warmup.store import RejectedArchive, Store, pack, unpack
from strata_kernels.warmup.time_budget import CircuitBreaker, TimeBudget
from tests.kernels.helpers.cache_entries import elf, kernel_entry, launcher_entry
from tests.kernels.helpers.store_races import Driver, Pointer, compile_made_up, copy_kernel, hex_of, look_up

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter has no cache")

KEY, FILES = kernel_entry(0)
ENTRIES = [kernel_entry(seed) for seed in range(4)] + [launcher_entry(0)]
SECRET = b"thirty-two bytes that nobody has"


def signed(root: Path, **options) -> Store:
    return Store(FolderStorage(root), "triton/python", **{"signing_key": SECRET, **options})


def archives(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(("key", "files"), [ENTRIES[0], ENTRIES[-1]], ids=["kernel", "launcher"])
def test_an_archive_has_the_entry_and_nothing_else(key, files):
    assert unpack(key, pack(key, files)) == files
    assert pack(key, dict(reversed(files.items())) | {triton_cache.DIGESTS: b"of another place"}) == pack(key, files)


def archive_of(*members: tarfile.TarInfo, data: bytes = b"data") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for member in members:
            member.size = len(data) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member("../outside")], "not a regular file of this entry"),
        ([member("/etc/passwd")], "not a regular file of this entry"),
        ([member(f"{KEY}/../../outside")], "not a regular file of this entry"),
        ([member(f"{KEY}/.hidden")], "not a regular file of this entry"),
        ([member("ANOTHERKEY/kernel.json")], "not a regular file of this entry"),
        ([member(f"{KEY}/link", tarfile.SYMTYPE, "/etc/passwd")], "not a regular file of this entry"),
        ([member(f"{KEY}/link", tarfile.LNKTYPE, "/etc/passwd")], "not a regular file of this entry"),
        ([member(f"{KEY}/device", tarfile.CHRTYPE)], "not a regular file of this entry"),
        ([member(f"{KEY}/sparse", tarfile.GNUTYPE_SPARSE)], "not a regular file of this entry"),
        ([member(f"{KEY}/{'long' * 50}")], "not a regular file of this entry"),
        ([member(f"{KEY}/twice")] * 2, "twice"),
        ([member(f"{KEY}/{i}") for i in range(200)], "too many"),
        ([member(f"{KEY}/kernel.json")], "no group file"),
        ([], "no group file"),
    ],
)
def test_an_archive_of_anything_else_is_refused(members, said):
    with pytest.raises(RejectedArchive, match=said):
        unpack(KEY, archive_of(*members))


def test_an_archive_that_inflates_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(store, "_MAX_BYTES", 1 << 20)
    bomb = archive_of(member(f"{KEY}/kernel.json"), data=bytes(2 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(RejectedArchive, match="too large uncompressed"):
        unpack(KEY, bomb)


def test_a_hundred_damaged_archives_are_refused(tmp_path):
    """Each twice: as a torn file under its old name, and as one whose name was made to fit, if that is possible."""
    shared, open_to_all = (
        signed(tmp_path / "a"),
        Store(FolderStorage(tmp_path / "b"), "triton/python", allow_unsigned=True),
    )
    shared.push(KEY, FILES)
    (torn,) = archives(tmp_path / "a")
    good, chance = torn.read_bytes(), random.Random(0)
    for _ in range(100):
        bad = bytearray(good)
        kind = chance.choice(("cut", "flip", "zeros", "more"))
        at = chance.randrange(len(bad))
        if kind == "cut":
            del bad[at:]
        elif kind == "flip":
            bad[at] ^= 1 << chance.randrange(8)
        elif kind == "zeros":
            bad[at : at + 512] = bytes(len(bad[at : at + 512]))
        else:
            bad += chance.randbytes(chance.randrange(1, 100))
        if bytes(bad) == good:
            continue
        torn.write_bytes(bad)
        assert shared.pull(KEY) is None and "SHA-256 differs from the one in its name" in shared.rejected.popitem()[1]
        name = open_to_all._name(KEY, bytes(bad))
        open_to_all.storage.write(name, bytes(bad))
        # What still unpacks to the very entry, as after a change of gzip's header, is no damage.
        assert open_to_all.pull(KEY) in (None, FILES)
        open_to_all.storage.remove(name)
    assert len(open_to_all.rejected) > 90
    assert shared.push(KEY, FILES) is False, "not known to be torn: this pod has not read it"
    assert shared.pull(KEY) is None and shared.push(KEY, FILES) is True and shared.pull(KEY) == FILES


def test_what_was_pushed_is_pulled_by_others(tmp_path):
    for key, files in ENTRIES:
        assert signed(tmp_path).push(key, files) is True and signed(tmp_path).push(key, files) is False
    for key, files in ENTRIES:
        assert signed(tmp_path).pull(key) == files
    assert signed(tmp_path).pull("NOKEY") is None
    other = Store(FolderStorage(tmp_path), "triton/other-python", signing_key=SECRET)
    assert other.pull(KEY) is None and other.push(KEY, FILES) is True


def test_nothing_unsigned_and_nothing_of_another_key_is_used(tmp_path):
    with pytest.raises(ValueError, match="needs a signing key"):
        Store(FolderStorage(tmp_path), "triton/python")
    unsigned = Store(FolderStorage(tmp_path), "triton/python", allow_unsigned=True)
    stranger = signed(tmp_path, signing_key=b"another key, also of 32 bytes...")
    assert unsigned.push(KEY, FILES) and stranger.push(KEY, FILES)
    reader = signed(tmp_path)
    assert reader.pull(KEY) is None
    assert sorted(reader.rejected.values()) == [
        "it is not signed",
        "it is signed with a key that this process lacks",
    ]
    assert reader.push(KEY, FILES) and reader.pull(KEY) == FILES and unsigned.pull(KEY) == FILES


def test_a_signature_is_good_for_one_key_in_one_environment(tmp_path):
    signed(tmp_path).push(KEY, FILES)
    (archive,) = archives(tmp_path)
    for folder in (f"triton/python/{ENTRIES[1][0]}", f"triton/another/{KEY}"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / archive.name).write_bytes(archive.read_bytes())
    elsewhere = Store(FolderStorage(tmp_path), "triton/another", signing_key=SECRET)
    assert signed(tmp_path).pull(ENTRIES[1][0]) is None and elsewhere.pull(KEY) is None


def test_what_was_not_used_for_longest_is_removed(tmp_path):
    full = signed(tmp_path)
    for age, (key, files) in enumerate(ENTRIES):
        full.push(key, files)
        used = time.time() - 48 * 3600 + age
        (archive,) = archives(tmp_path / "triton" / "python" / key)
        os.utime(archive, (used, used))
    (tmp_path / "somebody's file").write_bytes(bytes(10_000))
    full.pull(KEY)
    full.refresh_used()
    full.size_limit = sum(path.stat().st_size for path in archives(tmp_path / "triton")) - 1
    assert full.trim() == 1 and full.trim() == 0
    assert full.pull(KEY) == FILES and full.pull(ENTRIES[1][0]) is None and full.pull(ENTRIES[2][0]) is not None
    assert (tmp_path / "somebody's file").exists()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server of its own, and a bucket in it."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="kernels")
        yield "s3://kernels/strata"
    server.stop()


def test_an_object_store_does_what_a_folder_does(s3):
    def pod(**options) -> Store:
        return Store(open_storage(s3), "triton/python", **{"signing_key": SECRET, **options})

    assert pod().pull(KEY) is None
    for key, files in ENTRIES:
        assert pod().push(key, files) is True and pod().push(key, files) is False
        assert pod().pull(key) == files
    blobs = open_storage(s3)
    torn = blobs.list(f"triton/python/{KEY}")[0]
    assert isinstance(torn, Blob) and abs(torn.modified - time.time()) < 3600
    blobs.write(torn.name, blobs.read(torn.name)[:-9])
    reader = pod()
    assert reader.pull(KEY) is None and list(reader.rejected) == [torn.name]
    assert reader.push(KEY, FILES) and pod().pull(KEY) == FILES
    assert pod(size_limit=0).trim() == len(ENTRIES) and blobs.list("") == []
    with pytest.raises(FileNotFoundError):
        blobs.read(torn.name)


def test_without_fsspec_a_folder_works_and_a_url_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from strata_kernels.warmup.blob_storage import open_storage\n"
        f"open_storage('file://{tmp_path}').write('a/b', b'x'); print(open_storage('{tmp_path}').read('a/b'))\n"
        "open_storage('s3://bucket/path')"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout == "b'x'\n"
    assert "a store at s3://bucket/path needs fsspec and its library for that scheme, such as s3fs" in done.stderr


def warm(filler: CacheFiller) -> dict[str, str]:
    """Want every entry, as Triton does; returns where each came from."""
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


def test_what_is_torn_is_found_elsewhere_and_reported(tmp_path, pod):
    for root in (pod, tmp_path / "image"):
        triton_cache.store(root, KEY, FILES)
        (root / KEY / "kernel_0.cubin").write_bytes(b"\x7fELF")
    signed(tmp_path / "store").push(KEY, FILES)
    filler = CacheFiller(pod, [tmp_path / "image"], signed(tmp_path / "store"))
    assert warm(filler)[KEY] == "store"
    assert filler.problems == [
        f"{root / KEY}: kernel_0.cubin does not match its digest" for root in (pod, tmp_path / "image")
    ]


def test_a_torn_archive_is_refused_compiled_and_replaced(tmp_path, pod):
    signed(tmp_path / "store").push(KEY, FILES)
    (torn,) = archives(tmp_path / "store")
    torn.write_bytes(torn.read_bytes()[:100])
    filler = CacheFiller(pod, store=signed(tmp_path / "store"))
    assert warm(filler)[KEY] == "compiled"
    name = torn.relative_to(tmp_path / "store")
    assert filler.problems == [f"the store's archive {name} is rejected: its SHA-256 differs from the one in its name"]
    assert signed(tmp_path / "store").pull(KEY) == FILES


def test_builds_of_one_helper_side_by_side_leave_a_whole_one(pod):
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


def test_what_another_pod_has_mended_meanwhile_stays(pod, monkeypatch):
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
    replace = triton_cache._write_atomically

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

    monkeypatch.setattr(triton_cache, "_write_atomically", noting)
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


def test_a_store_that_never_answers_costs_its_time_and_no_more(tmp_path, pod, s3, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        slow = Store(open_storage(s3), "triton/python", signing_key=SECRET)
        filler = CacheFiller(pod, store=slow, breaker=CircuitBreaker(0.5))
        assert set(warm(filler).values()) == {"compiled"}
    assert filler.problems == ["could not read the store, so it is not used again: no answer within 0.5 s in all"]
    # The client itself would wait for minutes.
    assert 0.4 < filler.to_dict()["store_seconds"] < 30


def test_a_store_that_is_not_there_is_asked_once(tmp_path, pod):
    class Gone(FolderStorage):
        asked = 0

        def list(self, prefix: str) -> list[Blob]:
            Gone.asked += 1
            # What a mount whose server is gone answers.
            raise OSError(116, "Stale file handle")

    filler = CacheFiller(pod, store=Store(Gone(tmp_path), "triton/python", signing_key=SECRET))
    assert set(warm(filler).values()) == {"compiled"} and Gone.asked == 1
    assert "OSError: [Errno 116] Stale file handle" in filler.problems[0]


def test_a_disk_that_is_full_is_reported(tmp_path, pod):
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


def test_time_is_counted_once_for_calls_side_by_side():
    budget, release = TimeBudget(30), threading.Event()
    waiting = [threading.Thread(target=budget.call, args=(release.wait,)) for _ in range(8)]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)
    release.set()
    for thread in waiting:
        thread.join()
    assert 0.2 <= budget.spent < 1.0
    with pytest.raises(ZeroDivisionError):
        budget.call(lambda: 1 // 0)


def test_races_with_kills_and_torn_files():
    """A few of the races that `helpers/store_races.py` runs by the thousand, two with Triton's compiler."""
    command = [sys.executable, "-m", "tests.kernels.helpers.store_races", "--races", "12", "--real", "1", "--seed", "4"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
