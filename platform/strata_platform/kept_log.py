"""Kept logs: what the processes of a pod printed, in the folder of their run, for the time when the pod is gone.

    <output>/<name>/logs/20261128T221005Z-support-bot-w-0-0.jsonl

Each start of a pod has a file of its own; nothing replaces or deletes it but who removes the run's folder. That of a
pod that does not train is named by its task, `<time>-<pod>.plan.jsonl`. The first line says whose the file is, `{"pod":
..., "attempt": ...}`; each other one is a line of a process, `{"time": ..., "rank": ..., "text": ...}`, or says how
many were left out at that place, `{"dropped": ...}`.

The runtime writes these files; the backends read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from strata_platform.runs import LogLine

TRAIN, PLAN, PREPARE, FINISH = "train", "plan", "prepare", "finish"
"""What the pod of a kept log does."""

_NAME = re.compile(r"\d{8}T\d{6}Z-.+\.jsonl")
# Of a progress line with a line of another pod's kept log.
_FIELDS = ("time", "rank", "text", "source", "attempt", "kept")


def file_name(started: float, pod: str, task: str = TRAIN) -> str:
    """The name of the kept log of a pod that started then; names sort by that time.

    >>> file_name(0.0, "bot-w-0-0")
    '19700101T000000Z-bot-w-0-0.jsonl'
    >>> file_name(0.0, "bot-n0-0", PLAN)
    '19700101T000000Z-bot-n0-0.plan.jsonl'
    """
    suffix = "" if task == TRAIN else f".{task}"
    return f"{datetime.fromtimestamp(started, UTC):%Y%m%dT%H%M%SZ}-{pod}{suffix}.jsonl"


def started(name: str) -> float:
    """When the pod of a kept log started; no line in it is older. 0.0 if the name does not say so.

    >>> started("19700101T000109Z-bot-w-0-0.jsonl")
    69.0
    """
    try:
        return datetime.strptime(name.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def is_kept_log(name: str) -> bool:
    """Whether a file of this name is a kept log."""
    return _NAME.fullmatch(name) is not None


def is_of_training(name: str) -> bool:
    """Whether a file of this name is the kept log of a pod that trains.

    >>> [is_of_training(f"19700101T000000Z-{end}.jsonl") for end in ("bot-w-0-0", "bot-n0-0.plan")]
    [True, False]
    """
    return is_kept_log(name) and not name.endswith((f".{PLAN}.jsonl", f".{PREPARE}.jsonl", f".{FINISH}.jsonl"))


def header(pod: str, attempt: int) -> bytes:
    """The first line of a file."""
    return _line({"pod": pod, "attempt": attempt})


def entry(time: float, rank: int | None, text: str) -> bytes:
    """A line that a process printed; rank: None for the pod's first process."""
    return _line({"time": time, "rank": rank, "text": text})


def dropped(lines: int | None) -> bytes:
    """The place at which so many lines were left out; None: it is not known how many."""
    return _line({"dropped": lines})


def parse(name: str, content: bytes) -> list[LogLine]:
    """The lines in the file `name`, by time. Skips one that a kill cut off, and values of later versions."""
    pod, attempt, gap, found = "", 0, list[int | None](), list[LogLine]()

    def close_gap(time: float, rank: int | None) -> None:
        if gap:
            found.append(LogLine(time, rank, _sentence(gap), pod, attempt, name))
            gap.clear()

    for values in _objects(content):
        match values:
            case {"pod": str(pod), "attempt": int(attempt)}:
                continue
            case {"dropped": int() | None as lines}:
                gap.append(lines)
            case {"time": float(time), "rank": int() | None as rank, "text": str(text)}:
                close_gap(time, rank)
                found.append(LogLine(time, rank, text, pod, attempt, name))
    close_gap(found[-1].time if found else started(name), None)
    return sorted(found, key=lambda line: line.time)


def _sentence(gap: list[int | None]) -> str:
    """How many lines are missing at a place: the sum of what is said there; None is at least one."""
    number = sum(filter(None, gap))
    more = "more than " if number and None in gap else ""
    return f"... {more}{f'{number:,} ' if number else ''}lines are not kept ..."


def repeated(line: LogLine) -> dict[str, Any]:
    """A line of a pod that is gone as values of a progress line: a later pod of the run prints it for its readers."""
    return {"kept": {name: getattr(line, name) for name in _FIELDS}}


def original(values: dict[str, Any]) -> LogLine | None:
    """The line of another pod in the values of a progress line; None if they have no such line."""
    match values.get("kept"):
        case {
            "time": float(time),
            "rank": int() | None as rank,
            "text": str(text),
            "source": str(source),
            "attempt": int(attempt),
            "kept": str(kept),
        }:
            return LogLine(time, rank, text, source, attempt, kept)
    return None


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values
