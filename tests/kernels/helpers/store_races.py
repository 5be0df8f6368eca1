"""Processes that warm the same directory from the same store while some are killed and files are torn.

    python -m tests.kernels.helpers.store_races --races 1000 --real 10

In each race several processes want the same kernels. They find them in a directory, an image and a store that earlier
races left, with files cut short or changed as by a crashed machine, or they compile them; a random number of them is
killed at random moments. A process that lives must get every kernel, and the right one, and so must one that comes
after them. In most races the kernels are made up, and "compiling" writes them through Triton's own cache manager; in
the `real` ones Triton compiles.
"""

import argparse
import base64
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from strata_kernels.warmup import triton_cache
from strata_kernels.warmup.blob_storage import FolderStorage
from strata_kernels.warmup.cache_filler import CacheFiller
from strata_kernels.warmup.store import Store
from tests.kernels.helpers.cache_entries import kernel_entry, launcher_entry

KERNELS = [kernel_entry(seed, size=2000) for seed in range(6)]
LAUNCHERS = [launcher_entry(seed) for seed in range(2)]
SIGNING_KEY = b"a key for these races, 32 bytes."


def want_made_up(order: random.Random) -> None:
    """As Triton asks: look each kernel up, compile it if it is not there, read it."""
    for key, files in order.sample(KERNELS + LAUNCHERS, len(KERNELS + LAUNCHERS)):
        manager = get_cache_manager(hex_of(key))
        # Triton does not look again for what it has just compiled: it reads the files that it has written.
        found = look_up(manager, files) or compile_made_up(manager, files)
        expected = {name: data for name, data in files.items() if not name.startswith(triton_cache.GROUP)}
        assert found == expected, f"{key}: wrong kernel"


def look_up(manager, files):
    """The files that Triton would use, or None if it would compile."""
    group = [name.removeprefix(triton_cache.GROUP) for name in files if name.startswith(triton_cache.GROUP)]
    paths = manager.get_group(group[0]) if group else {name: manager.get_file(name) for name in files}
    # What Triton does with a group that has no metadata, and with a file that is gone.
    if not paths or (group and group[0] not in paths) or None in paths.values():
        return None
    return {name: Path(path).read_bytes() for name, path in paths.items()}


def compile_made_up(manager, files):
    """Write them as Triton's compiler does, and read what is there then."""
    group = {name: manager.put(data, name) for name, data in files.items() if not name.startswith(triton_cache.GROUP)}
    for name in files:
        if name.startswith(triton_cache.GROUP):
            manager.put_group(name.removeprefix(triton_cache.GROUP), group)
    return {name: Path(path).read_bytes() for name, path in group.items()}


class Driver:
    """What the compiler asks of a driver."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    map_python_to_cpp_type = staticmethod(lambda kind: kind)


class Pointer:
    dtype = "fp32"
    data_ptr = staticmethod(lambda: 0)


@triton.jit
def copy_kernel(p_x, p_y, D: tl.constexpr):
    o = tl.arange(0, D)
    tl.store(p_y + o, tl.load(p_x + o))


def want_real(order: random.Random) -> None:
    """Two kernels of Triton's, compiled for an H200 without one, and read again."""
    triton.runtime.driver.set_active(Driver())
    for width in order.sample((16, 32), 2):
        kernel = copy_kernel.warmup(Pointer, Pointer, D=width, enable_fp_fusion=True, grid=(1,))
        assert f"tensor<{width}x" in kernel.asm["ttir"] and kernel.asm["cubin"][:4] == b"\x7fELF"


def run(root: Path, want: Callable[[random.Random], None], seed: int) -> None:
    """One process."""
    os.environ["TRITON_CACHE_DIR"] = str(root / "cache")
    store = Store(FolderStorage(root / "store"), "environment", signing_key=SIGNING_KEY, size_limit=20_000)
    filler = CacheFiller(root / "cache", [root / "image"], store)
    with filler.installed():
        want(random.Random(seed))
    filler.push()


def race(root: Path, want: Callable[[random.Random], None], seed: int, processes: int, within: float) -> list[str]:
    """What was wrong, in words; [] for a race in which nothing was. `within`: the seconds in which some are killed."""
    chance = random.Random(seed)
    left_behind(root, chance)
    children = [_fork(lambda i=i: run(root, want, 1000 * seed + i)) for i in range(processes)]
    victims = chance.sample(children, chance.randint(0, processes - 1))
    for victim in victims:
        time.sleep(chance.uniform(0, within) / processes)
        os.kill(victim, signal.SIGKILL)
    wrong = []
    for child in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0 and not (status == -signal.SIGKILL and child in victims):
            wrong.append(f"race {seed}: a process ended with {status}")
    after = os.waitpid(_fork(lambda: run(root, want, seed)), 0)[1]
    return wrong if after == 0 else [*wrong, f"race {seed}: who came after them failed"]


def left_behind(root: Path, chance: random.Random) -> None:
    """Before a race: sometimes an empty directory, always some torn files in each of the places."""
    for place, emptied in (("cache", 0.3), ("image", 0.1), ("store", 0.1)):
        if chance.random() < emptied:
            shutil.rmtree(root / place, ignore_errors=True)
        if place == "image" and not (root / place).exists():
            for key, files in chance.sample(KERNELS, 3):
                triton_cache.store(root / place, key, files)
        for path in sorted(path for path in (root / place).rglob("*") if path.is_file()):
            # Text that Triton alone vouches for may be cut without a sign of it; a crash leaves that rarely, and the
            # seal is there before the group file is.
            if chance.random() < 0.1:
                data = path.read_bytes()
                path.write_bytes(data[: chance.randrange(len(data) + 1)])


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def hex_of(key: str) -> str:
    """The hash that Triton looks a folder up by."""
    return base64.b32decode(key + "=" * (-len(key) % 8)).hex()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=1000, help="with kernels that are made up")
    parser.add_argument("--real", type=int, default=10, help="with kernels that Triton compiles")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = []
    for want, number, within in ((want_made_up, given.races, 0.1), (want_real, given.real, 3.0)):
        with tempfile.TemporaryDirectory() as root:
            for seed in range(given.seed, given.seed + number):
                wrong += race(Path(root), want, seed, given.processes, within)
    print(*wrong, f"{given.races} races, {given.real} more with Triton's compiler: {len(wrong)} failures", sep="\n")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
