"""Cache entries as Triton writes them, made in a moment: nothing can be launched from them, every check applies."""

import hashlib
import json
import random
import struct

from strata_kernels.warmup.triton_cache import entry_key


def elf(body: bytes) -> bytes:
    """A 64-bit ELF file with one section, its table last, as in a cubin."""
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 56, 0, 64, 1, 0
    )
    return header + body + struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, len(body), 0, 0, 1, 0)


def kernel_entry(seed: int, size: int = 300) -> tuple[str, dict[str, bytes]]:
    """Key and files of a kernel's entry, a function of the seed."""
    digest = hashlib.sha256(f"kernel {seed}".encode()).digest()
    body = random.Random(seed).randbytes(size)
    files = {
        f"kernel_{seed}.json": json.dumps({"hash": digest.hex(), "name": f"kernel_{seed}"}).encode(),
        f"kernel_{seed}.ptx": b"// " + body.hex().encode(),
        f"kernel_{seed}.cubin": elf(body),
    }
    group = json.dumps({"child_paths": {name: name for name in files}}).encode()
    return entry_key(digest), {**files, f"__grp__kernel_{seed}.json": group}


def launcher_entry(seed: int) -> tuple[str, dict[str, bytes]]:
    """Key and the one file of a launcher's entry, which has no group."""
    digest = hashlib.sha256(f"launcher {seed}".encode()).digest()
    return entry_key(digest), {"__triton_launcher.cpython-312-x86_64-linux-gnu.so": elf(digest * 9)}
