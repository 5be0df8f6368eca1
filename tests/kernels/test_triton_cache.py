"""Entries of Triton's cache directory, and whether Triton itself hits or misses them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strata_kernels.warmup import triton_cache
from tests.kernels.helpers.cache_entries import kernel_entry, launcher_entry

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter has no cache")

ENTRIES = [kernel_entry(0), launcher_entry(0)]
IDS = ["kernel", "launcher"]


def as_triton_writes(directory: Path, key: str, files: dict[str, bytes]) -> None:
    """Without digests, with absolute paths in the group file."""
    triton_cache.store(directory, key, files)
    (directory / key / triton_cache.DIGESTS).unlink()


@pytest.mark.parametrize(("key", "files"), ENTRIES, ids=IDS)
def test_a_stored_entry_is_loaded(tmp_path, key, files):
    triton_cache.store(tmp_path, key, files)
    loaded = triton_cache.load(tmp_path, key)
    assert loaded is not None and loaded.pop(triton_cache.DIGESTS) and loaded == files
    assert triton_cache.keys(tmp_path) == [key]


def test_a_missing_entry_is_none(tmp_path):
    key, _ = ENTRIES[0]
    (tmp_path / "file").touch()
    assert triton_cache.keys(tmp_path) == triton_cache.keys(tmp_path / "none") == []
    assert triton_cache.load(tmp_path, key) is None is triton_cache.load(tmp_path / "none", key)
    (tmp_path / key).mkdir()
    assert triton_cache.load(tmp_path, key) is None


def test_a_compilation_that_never_ended_is_no_entry(tmp_path):
    key, files = ENTRIES[0]
    as_triton_writes(tmp_path, key, files)
    (tmp_path / key / "__grp__kernel_0.json").unlink()
    (tmp_path / key / "tmp.pid_7_x").mkdir()
    assert triton_cache.load(tmp_path, key) is None
    with pytest.raises(triton_cache.CorruptEntry, match="its compilation did not finish"):
        triton_cache.add_digests(tmp_path, key)


@pytest.mark.parametrize("digests", [True, False], ids=["with_digests", "as_triton_writes"])
@pytest.mark.parametrize(("key", "files"), ENTRIES, ids=IDS)
def test_every_truncated_file_is_found_and_becomes_a_miss(tmp_path, key, files, digests):
    """Truncated anywhere; Triton's own entries have no digests, and truncated text is not noticed."""
    for name, data in files.items():
        if not digests and name.endswith(".ptx"):
            continue
        for length in {0, 1, len(data) // 2, len(data) - 1}:
            (triton_cache.store if digests else as_triton_writes)(tmp_path, key, files)
            path = tmp_path / key / name
            path.write_bytes(path.read_bytes()[:length])
            with pytest.raises(triton_cache.CorruptEntry):
                triton_cache.load(tmp_path, key)
            triton_cache.invalidate(tmp_path, key)
            assert triton_cache.load(tmp_path, key) is None


def test_digests_find_a_changed_byte(tmp_path):
    key, files = ENTRIES[0]
    as_triton_writes(tmp_path, key, files)
    triton_cache.add_digests(tmp_path, key)
    for name, data in files.items():
        if not name.startswith(triton_cache.GROUP):
            (tmp_path / key / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
            with pytest.raises(triton_cache.CorruptEntry, match=f"{name} does not match its digest"):
                triton_cache.load(tmp_path, key)
            (tmp_path / key / name).write_bytes(data)


def test_another_kernel_under_a_key_is_found(tmp_path):
    (key, files), (_, others) = kernel_entry(0), kernel_entry(1)
    with pytest.raises(triton_cache.CorruptEntry, match="belongs to another kernel"):
        triton_cache.check(key, others)
    with pytest.raises(triton_cache.CorruptEntry, match=r"kernel_0\.cubin, which does not exist"):
        triton_cache.check(key, {name: data for name, data in files.items() if not name.endswith("cubin")})
    with pytest.raises(triton_cache.CorruptEntry, match="is not valid"):
        triton_cache.check(key, files | {"__grp__kernel_0.json": b'{"child_paths": {"../x": "../x"}}'})


def test_storing_again_repairs(tmp_path):
    key, files = ENTRIES[0]
    triton_cache.store(tmp_path, key, files)
    (tmp_path / key / "kernel_0.cubin").write_bytes(b"")
    (tmp_path / key / "left_behind.ttir").touch()
    triton_cache.store(tmp_path, key, files)
    loaded = triton_cache.load(tmp_path, key)
    assert loaded is not None and {name: loaded[name] for name in files} == files


def test_a_moved_directory_is_relocated(tmp_path):
    for key, files in ENTRIES:
        triton_cache.store(tmp_path / "old", key, files)
    torn, files = kernel_entry(1)
    triton_cache.store(tmp_path / "old", torn, files)
    (tmp_path / "old" / torn / "kernel_1.ptx").unlink()
    moved = shutil.move(tmp_path / "old", tmp_path / "new")
    assert triton_cache.relocate(moved) == 1 and triton_cache.relocate(moved) == 0
    key, _ = ENTRIES[0]
    children = json.loads((moved / key / "__grp__kernel_0.json").read_text())["child_paths"]
    assert children["kernel_0.ptx"] == str(moved / key / "kernel_0.ptx")
    assert triton_cache.load(moved, key) is not None
    with pytest.raises(triton_cache.CorruptEntry, match=r"kernel_1\.ptx"):
        triton_cache.load(moved, torn)


COMPILE = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    map_python_to_cpp_type = staticmethod(lambda kind: kind)

class Pointer:
    dtype = "fp32"
    data_ptr = staticmethod(lambda: 0)

@triton.jit
def copy_kernel(p_x, p_y, D: tl.constexpr):
    o = tl.arange(0, D)
    tl.store(p_y + o, tl.load(p_x + o))

triton.runtime.driver.set_active(Driver())
triton.knobs.compilation.listener = lambda cache_hit, **event: print("hit" if cache_hit else "miss")
copy_kernel.warmup(Pointer, Pointer, D=int(sys.argv[1]), grid=(1,))
"""


def compile_in(directory: Path, width: int = 16) -> str:
    """Compile a kernel for an H200, without one, in a process of its own; was it a hit in the cache, or a miss?"""
    script = directory.parent / "compile_one.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(directory)}
    command = [sys.executable, str(script), str(width)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.strip()


def test_triton_hits_after_a_move_and_misses_a_corrupt_entry(tmp_path):
    """With the real compiler: an entry that is moved, relocated, truncated, and stored again."""
    assert compile_in(tmp_path / "baked") == "miss"
    (key,) = triton_cache.keys(tmp_path / "baked")
    files = triton_cache.load(tmp_path / "baked", key)
    moved = shutil.move(tmp_path / "baked", tmp_path / "moved")
    assert triton_cache.relocate(moved) == 1
    assert compile_in(moved) == "hit"

    shutil.copytree(moved, tmp_path / "torn")
    (tmp_path / "torn" / key / "__grp__copy_kernel.json").write_text('{"child_pa')
    triton_cache.invalidate(tmp_path / "torn", key)
    assert compile_in(tmp_path / "torn") == "miss"

    triton_cache.store(tmp_path / "unpacked", key, files)
    assert compile_in(tmp_path / "unpacked") == "hit"
    assert compile_in(tmp_path / "unpacked", width=32) == "miss"
