"""Preparation of data: tokens per second of a core beside `datasets`, and memory by the size of the corpus.

    PYTHONPATH=kernels:platform:. python -m benchmarks.preparation speed [--megabytes 64] [--processes 1 2] [--rounds 3]
    PYTHONPATH=kernels:platform:. python -m benchmarks.preparation scaling [--megabytes 50] [--processes 1 2 4 8 16]
    PYTHONPATH=kernels:platform:. python -m benchmarks.preparation memory [--megabytes 100 1000 10000]

`speed` prepares one corpus by `prepare`, and by `datasets.map` with the same tokenizer followed by TRL's packing by
best-fit decreasing, which is the packing of `prepare`, with the same number of processes, in turns. Each runs in a
fresh process after its imports. Processor seconds are those of all its processes, also of their starts: on a machine
with other work they say more than the time on the clock. Both must give the same number of tokens.

`scaling` gives each process as much text, beside the least that a script can do: in each process, lines are read,
`tokenizers.encode_batch_fast` encodes them, and the packing of `prepare` makes rows of token ids. That script checks
nothing, masks nothing, and loses its work when it is killed.

`memory` prepares corpora of several sizes with a tokenizer of one token a word, which is faster than others. A corpus
is a file of 100 MB, repeated.

The last two print each line as soon as it is measured, and leave out what does not fit into `--seconds`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = 2048
DOCUMENT = 4000
# Bytes of a corpus that is repeated.
BLOCK = 100_000_000
WORK = Path("out/preparation")
PACKING = Path("tasks/runtime/data/preparation/packing.py")


def texts() -> Iterator[str]:
    """Pieces of the standard library's sources, of about `DOCUMENT` characters, without an end."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    found = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    number = 0
    while True:
        for text in found:
            for begin in range(0, len(text), DOCUMENT):
                number += 1
                yield f"# {number}\n{text[begin : begin + DOCUMENT]}"


def words() -> Iterator[str]:
    """Texts of 120 words of 32 characters, of 10,000 that there are."""
    number = 0
    while True:
        number += 1
        yield " ".join(f"{(number * 7919 + place) * 104729 % 10_000:032d}" for place in range(120))


def corpus(source: Iterator[str], path: Path, megabytes: int) -> Path:
    """A file of JSON Lines of a size."""
    if not path.exists():
        size = 0
        with open(path, "w", encoding="utf-8") as file:
            while size < megabytes * 1_000_000:
                size += file.write(json.dumps({"text": next(source)}) + "\n")
    return path


def repeated_corpus(path: Path, megabytes: int) -> Path:
    """A file of `words`, of which the first 100 MB are repeated up to a size."""
    size = min(megabytes, BLOCK // 1_000_000)
    block = corpus(words(), WORK / f"block-{size}.jsonl", size).read_bytes()
    with open(path, "wb") as file:
        for _ in range(max(1, megabytes * 1_000_000 // BLOCK)):
            file.write(block)
    return path


def recipe_for(source: Path, tokenizer: Path) -> Any:
    from strata_platform.spec import DataRecipe, RunSpec
    from tasks.runtime.data import fingerprint

    data = {"source": str(source), "sequence_length": LENGTH, "validation_fraction": 0}
    spec = RunSpec.model_validate(
        {"data": data, "objective": {"type": "pretrain"}, "model": {"tokenizer": str(tokenizer)}}
    )
    return DataRecipe.from_spec(spec, fingerprint(spec))


def by_prepare(source: Path, tokenizer: Path, processes: int, out: Path) -> dict[str, float]:
    import warnings

    from tasks.runtime.data import prepare
    from tasks.runtime.data.preparation import pipeline

    # Several parts also of a small corpus.
    pipeline.PART_BYTES = min(pipeline.PART_BYTES, max(1, source.stat().st_size // (4 * processes)))
    warnings.simplefilter("ignore")
    recipe = recipe_for(source, tokenizer)
    measured = Measured()
    data = prepare(recipe, out, report=lambda line: None, processes=processes)
    train = data.manifest.train
    return {"tokens": train.tokens, "rows": train.rows, "fill": train.fill(LENGTH), **measured.end()}


def by_datasets(source: Path, tokenizer_folder: Path, processes: int, out: Path) -> dict[str, float]:
    import datasets
    from transformers import AutoTokenizer
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    end = [tokenizer.eos_token_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(batch["text"], return_attention_mask=False, verbose=False)["input_ids"]
        pieces = ((ids + end)[at : at + LENGTH] for ids in found for at in range(0, len(ids) + 1, LENGTH - 1))
        return {"input_ids": [piece for piece in pieces if len(piece) > 1]}

    measured = Measured()
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out), num_proc=processes)
    options = {"batched": True, "num_proc": processes, "load_from_cache_file": False}
    rows = rows.map(encode, remove_columns=rows.column_names, **options)
    packed = pack_dataset(rows, LENGTH, strategy="bfd", map_kwargs={k: v for k, v in options.items() if k != "batched"})
    tokens = sum(map(sum, packed.with_format("arrow")["seq_lengths"].to_pylist()))
    return {"tokens": tokens, "rows": len(packed), "fill": tokens / len(packed) / LENGTH, **measured.end()}


def by_encode_batch(source: Path, tokenizer: Path, processes: int, out: Path) -> dict[str, float]:
    import multiprocessing

    out.mkdir()
    size = source.stat().st_size
    cuts = [size * part // (4 * processes) for part in range(4 * processes + 1)]
    tasks = [(source, tokenizer, begin, end, out) for begin, end in itertools.pairwise(cuts)]
    measured = Measured()
    if processes == 1:
        _use_one_thread()
        found = [_encode_lines(task) for task in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(processes, _use_one_thread) as pool:
            found = pool.map(_encode_lines, tasks, chunksize=1)
            pool.close()
            # Their processor seconds count only when they have ended.
            pool.join()
    tokens, rows = map(sum, zip(*found, strict=True))
    return {"tokens": tokens, "rows": rows, "fill": tokens / rows / LENGTH, **measured.end()}


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_lines(task: tuple[Path, Path, int, int, Path]) -> tuple[int, int]:
    """Encode, pack and write the lines that begin in a range of bytes. Returns the tokens and the rows."""
    import numpy as np
    from tokenizers import Tokenizer

    # Without the package around it, which imports torch.
    pack = runpy.run_path(str(PACKING))["pack"]
    source, tokenizer, begin, end, out = task
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    last = encoder.token_to_id("<|eos|>")
    pieces = []
    with open(source, "rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()
        while file.tell() < end and (lines := file.readlines(min(1 << 22, end - file.tell()))):
            for encoding in encoder.encode_batch_fast([json.loads(line)["text"] for line in lines]):
                ids = np.array([*encoding.ids, last], dtype=np.int32)
                pieces += [ids[at : at + LENGTH] for at in range(0, len(ids) - 1, LENGTH - 1)]
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    rows = pack(lengths, LENGTH)
    order = np.argsort(rows, kind="stable")
    with open(out / f"{begin}.npz", "wb") as file:
        np.savez(file, ids=np.concatenate([pieces[index] for index in order]), lengths=lengths[order], rows=rows[order])
    return int(lengths.sum()), int(rows.max()) + 1


class Measured:
    """Seconds on the clock, processor seconds and peak memory of this process and those that it starts."""

    def __init__(self) -> None:
        self._started, self._used = time.monotonic(), self._seconds()

    def end(self) -> dict[str, float]:
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {
            "wall": time.monotonic() - self._started,
            "cpu": self._seconds() - self._used,
            "peak_mib": peak / 1024,
            "load": os.getloadavg()[0],
        }

    def _seconds(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)


WAYS = {"prepare": by_prepare, "datasets": by_datasets, "encode_batch": by_encode_batch}


def measure(way: str, source: Path, tokenizer: Path, processes: int) -> dict[str, float]:
    """Run one way in a process of its own."""
    out = WORK / "result"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.preparation", "one", way, source, tokenizer, str(processes), out]
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(out, ignore_errors=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def speed(megabytes: int, processes: list[int], rounds: int, tokenizer: Path | None) -> None:
    source = corpus(texts(), WORK / f"texts-{megabytes}.jsonl", megabytes)
    tokenizer = tokenizer or text_tokenizer(WORK / "tokenizer")
    print("| processes | way | tokens | rows full, % | tokens per processor second | tokens/s | load | peak, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for count in processes:
        results: dict[str, list[dict[str, float]]] = {"prepare": [], "datasets": []}
        for _ in range(rounds):
            for way in results:
                results[way].append(measure(way, source, tokenizer, count))
                print(f"{way} {count} {results[way][-1]}", file=sys.stderr, flush=True)
        rates = {way: statistics.median(one["tokens"] / one["cpu"] for one in found) for way, found in results.items()}
        for way, runs in results.items():
            last, wall = runs[-1], statistics.median(one["tokens"] / one["wall"] for one in runs)
            load, peak = (statistics.median(one[name] for one in runs) for name in ("load", "peak_mib"))
            print(
                f"| {count} | {way} | {last['tokens']:,.0f} | {100 * last['fill']:.1f} | {rates[way]:,.0f} "
                f"| {wall:,.0f} | {load:.1f} | {peak:,.0f} |"
            )
        print(f"{count} processes: {rates['prepare'] / rates['datasets']:.2f} times datasets, by processor seconds")


def scaling(megabytes: int, processes: list[int], ways: list[str], seconds: float) -> None:
    """Measure each number of processes with so many megabytes for each of them."""
    tokenizer, left = text_tokenizer(WORK / "tokenizer"), TimeLeft(seconds)
    print("| processes | way | text, MB | tokens | tokens/s | per processor second | seconds | peak of one, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for count in processes:
        size = megabytes * count
        source = corpus(texts(), WORK / f"texts-{size}.jsonl", size)
        for way in ways:
            if not left.allows():
                print(f"{count} processes, {way}: left out, no time", flush=True)
                continue
            found = measure(way, source, tokenizer, count)
            print(
                f"| {count} | {way} | {size:,} | {found['tokens']:,.0f} | {found['tokens'] / found['wall']:,.0f} "
                f"| {found['tokens'] / found['cpu']:,.0f} | {found['wall']:.1f} | {found['peak_mib']:,.0f} |",
                flush=True,
            )
        source.unlink()


def memory(sizes: list[int], processes: int, seconds: float) -> None:
    """Measure the memory that corpora of several sizes take."""
    tokenizer, left = word_tokenizer(WORK / "word-tokenizer"), TimeLeft(seconds)
    print("| corpus, MB | processes | tokens | peak of the largest process, MiB | processor seconds | seconds | load |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    before = 0
    for size in sizes:
        # By the time of the one before; its start does not grow.
        if not left.allows(size / before if before else 1.0):
            print(f"{size:,} MB: left out, no time", flush=True)
            continue
        before = size
        source = repeated_corpus(WORK / f"words-{size}.jsonl", size)
        found = measure("prepare", source, tokenizer, processes)
        source.unlink()
        print(
            f"| {size:,} | {processes} | {found['tokens']:,.0f} | {found['peak_mib']:,.0f} | {found['cpu']:,.0f} "
            f"| {found['wall']:,.0f} | {found['load']:.1f} |",
            flush=True,
        )


class TimeLeft:
    """Whether the next measurement, which takes as long as the last or some times that, ends within a time."""

    def __init__(self, seconds: float) -> None:
        self._begun = self._last = time.monotonic()
        self._seconds = seconds

    def allows(self, times: float = 1.0) -> bool:
        """Whether `times` the time since the last call is left."""
        now = time.monotonic()
        taken, self._last = now - self._last, now
        return now + times * taken < self._begun + self._seconds


def text_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer of 4096 tokens, trained on the first 2,000 of `texts`."""
    from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer

    found = texts()
    save_tokenizer(train_tokenizer(next(found) for _ in range(2000)), folder)
    return folder


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer of one token for each word of `words`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unknown, end = "<unk>", "<eos>"
    names = [unknown, end, "a", "x", "0", "\n", "¬", *(f"{number:032d}" for number in range(10_000))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, unk_token=unknown)
    fast.save_pretrained(str(folder))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    fast = kinds.add_parser("speed")
    fast.add_argument("--megabytes", type=int, default=64)
    fast.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    fast.add_argument("--rounds", type=int, default=3)
    fast.add_argument("--tokenizer", type=Path, help="a folder; by default one is trained on the texts")
    scaled = kinds.add_parser("scaling")
    scaled.add_argument("--megabytes", type=int, default=50, help="of text for each process")
    scaled.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    scaled.add_argument("--ways", nargs="+", choices=WAYS, default=["prepare", "encode_batch"])
    flat = kinds.add_parser("memory")
    flat.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000, 10_000])
    flat.add_argument("--processes", type=int, default=2)
    for limited in (scaled, flat):
        limited.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that takes longer")
    one = kinds.add_parser("one")
    one.add_argument("way", choices=WAYS)
    for name in ("source", "tokenizer"):
        one.add_argument(name, type=Path)
    one.add_argument("processes", type=int)
    one.add_argument("out", type=Path)
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if asked.kind == "speed":
        speed(asked.megabytes, asked.processes, asked.rounds, asked.tokenizer)
    elif asked.kind == "scaling":
        scaling(asked.megabytes, asked.processes, asked.ways, asked.seconds)
    elif asked.kind == "memory":
        memory(asked.megabytes, asked.processes, asked.seconds)
    else:
        print(json.dumps(WAYS[asked.way](asked.source, asked.tokenizer, asked.processes, asked.out)))


if __name__ == "__main__":
    main()
