"""The store: pushed archives come back, truncated, forged or foreign ones are rejected."""

import io
import os
import random
import subprocess
import sys
import tarfile
import time

import pytest

from strata_kernels.warmup import store, triton_cache
from strata_kernels.warmup.blob_storage import Blob, FolderStorage, open_storage
from strata_kernels.warmup.store import RejectedArchive, Store, pack, unpack
from tests.kernels.helpers.stores import ENTRIES, FILES, KEY, SECRET, archives, signed

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter has no cache")


@pytest.mark.parametrize(("key", "files"), [ENTRIES[0], ENTRIES[-1]], ids=["kernel", "launcher"])
def test_an_archive_contains_the_entry_only(key, files):
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
    ("members", "message"),
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
def test_an_archive_of_anything_else_is_rejected(members, message):
    with pytest.raises(RejectedArchive, match=message):
        unpack(KEY, archive_of(*members))


def test_an_archive_that_is_too_large_uncompressed_is_rejected(monkeypatch):
    monkeypatch.setattr(store, "_MAX_BYTES", 1 << 20)
    bomb = archive_of(member(f"{KEY}/kernel.json"), data=bytes(2 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(RejectedArchive, match="too large uncompressed"):
        unpack(KEY, bomb)


def test_a_hundred_damaged_archives_are_rejected(tmp_path):
    """Each twice: under the old name, whose SHA-256 differs, and under a name with the right one."""
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
    assert shared.push(KEY, FILES) is False, "this pod has not read it, so it does not know that it is truncated"
    assert shared.pull(KEY) is None and shared.push(KEY, FILES) is True and shared.pull(KEY) == FILES


def test_other_pods_pull_a_pushed_entry(tmp_path):
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


def test_trim_removes_the_least_recently_used(tmp_path):
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
