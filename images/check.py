"""Check the Dockerfile without Docker: read it, hold it to rules, run its steps in a folder of one's own.

    python images/check.py                                  what is wrong with it, if anything
    python images/check.py --execute installer,platform-packages DIR
    python images/check.py --execute kernels DIR --set MODELS=qwen3-4b --set ARCHS=sm_90
                                                            the steps of stages, with DIR in place of the root

Steps that need root, of apt-get and useradd, are left out of the second, and named.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of this name BuildKit reads it for this Dockerfile, and Flyte, which registers the folder, does not.
IGNORED = "Dockerfile.dockerignore"
TARGETS = ("training", "platform")

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
# Folders of the image that a run of its steps moves below another root.
_ABSOLUTE = re.compile(r"(?<![\w./$}-])/(opt|src|app|home|var/cache/strata)\b")
_AS_ROOT = re.compile(r"\b(apt-get|useradd)\b")
_SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|API_?KEY", re.IGNORECASE)


@dataclass
class Stage:
    """From one FROM to the next. `base` is a stage's name, or an image's with its tag."""

    name: str
    base: str
    steps: list[tuple[int, str, str]] = field(default_factory=list)
    """Line, instruction, and the rest of it."""

    def all(self, instruction: str) -> list[tuple[int, str]]:
        """Line and text of every such instruction."""
        return [(line, text) for line, name, text in self.steps if name == instruction]


def read(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by their names, in order; arguments before the first FROM are put into its image."""
    outer: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line, instruction, rest in _instructions(text):
        if instruction == "FROM":
            match = re.fullmatch(r"(\S+)\s+AS\s+(\S+)", rest, re.IGNORECASE)
            if match is None:
                raise ValueError(f"line {line}: FROM {rest}: a stage has to have a name, for --target and COPY --from")
            stages[match[2]] = Stage(match[2], _VARIABLE.sub(lambda name: outer.get(name[1], name[0]), match[1]))
        elif stages:
            list(stages.values())[-1].steps.append((line, instruction, rest))
        elif instruction == "ARG":
            name, _, value = rest.partition("=")
            outer[name] = value
    return stages


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        first = first or number
        joined += stripped.removesuffix("\\").strip() + " "
        if not stripped.endswith("\\"):
            instruction, _, rest = joined.strip().partition(" ")
            yield first, instruction.upper(), rest.strip()
            joined, first = "", 0


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage, that which it is built from, and so on."""
    found = [stages[name]]
    while found[-1].base in stages:
        found.append(stages[found[-1].base])
    return found


def _last(stages: dict[str, Stage], target: str, instruction: str) -> str:
    """What holds for the target: its own last such instruction, or the one that it inherits."""
    texts = [stage.all(instruction)[-1][1] for stage in lineage(stages, target) if stage.all(instruction)]
    return texts[0] if texts else ""


def images_are_pinned(stages: dict[str, Stage]) -> Iterator[str]:
    """A tag with a whole version, or a digest."""
    for stage in stages.values():
        if stage.base not in stages and not re.search(r"@sha256:[0-9a-f]{64}$|:\d+\.\d+\.\d+[\w.-]*$", stage.base):
            yield f"stage {stage.name} starts from {stage.base}: pin a whole version, or a digest"


def packages_are_pinned(stages: dict[str, Stage]) -> Iterator[str]:
    """From a lock with hashes, from the sources here, or one version by name."""
    for stage in stages.values():
        for line, text in stage.all("RUN"):
            for command in re.split(r"&&|;|\|", text):
                words = shlex.split(command)
                if "pip" not in words or "install" not in words:
                    continue
                named = [word for word in words[words.index("install") + 1 :] if re.match(r"[A-Za-z]", word)]
                named = [word for word in named if word not in _values(words)]
                if "--require-hashes" in words or all("==" in word for word in named):
                    continue
                yield f"line {line}: {command.strip()}: give --require-hashes and a lock, or a version after =="


def _values(words: list[str]) -> set[str]:
    """Words that belong to the option before them."""
    return {after for word, after in pairwise(words) if word in ("--python", "-r", "--requirement")}


def apt_leaves_nothing(stages: dict[str, Stage]) -> Iterator[str]:
    """Lists are fetched, used and removed in one layer, and nothing is installed that was not asked for."""
    for stage in stages.values():
        for line, text in stage.all("RUN"):
            if "apt-get install" in text:
                for needed in ("apt-get update", "--no-install-recommends", "--yes", "rm -rf /var/lib/apt/lists/*"):
                    if needed not in text:
                        yield f"line {line}: apt-get install without {needed}"


def sources_are_copied(stages: dict[str, Stage]) -> Iterator[str]:
    """COPY, not ADD; from stages that exist above; of files that exist and that Dockerfile.dockerignore lets pass."""
    seen: list[str] = []
    for stage in stages.values():
        for line, _ in stage.all("ADD"):
            yield f"line {line}: ADD fetches and unpacks; use COPY"
        for line, text in stage.all("COPY"):
            origin = re.search(r"--from=(\S+)", text)
            if origin:
                if origin[1] not in seen:
                    yield f"line {line}: COPY --from={origin[1]}: no such stage above"
                continue
            for source in _sources(text):
                if not (ROOT / source).exists():
                    yield f"line {line}: COPY {source}: it is not there"
                elif not _passes(source):
                    yield f"line {line}: COPY {source}: {IGNORED} keeps it out"
        seen.append(stage.name)


def _sources(text: str) -> list[str]:
    return [word for word in text.split() if not word.startswith("--")][:-1]


def _passes(source: str) -> bool:
    """Whether Dockerfile.dockerignore, whose last fitting line counts, lets through the path or something in it."""
    passes = True
    for line in (ROOT / IGNORED).read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if fnmatch.fnmatch(source, pattern) or (line.startswith("!") and pattern.startswith(f"{source}/")):
            passes = line.startswith("!")
    return passes


def variables_are_declared(stages: dict[str, Stage]) -> Iterator[str]:
    """ARG does not reach the next stage, and an undeclared variable is empty without a word."""
    for stage in stages.values():
        above = lineage(stages, stage.name)
        known = {"PATH"} | {_name(text) for one in above for _, text in one.all("ARG") if one is stage}
        known |= {_name(pair) for one in above for _, text in one.all("ENV") for pair in shlex.split(text)}
        for line, _, text in stage.steps:
            for name in _VARIABLE.findall(text):
                if name not in known:
                    yield f"line {line}: ${name} is declared nowhere in stage {stage.name}"


def _name(text: str) -> str:
    return text.partition("=")[0]


def nothing_runs_as_root(stages: dict[str, Stage]) -> Iterator[str]:
    """Each image ends with a user of its own."""
    for target in TARGETS:
        if _last(stages, target, "USER").split(":")[0] in ("", "root", "0"):
            yield f"image {target} runs as root: end it with USER"


def signals_arrive(stages: dict[str, Stage]) -> Iterator[str]:
    """Process 1 is tini, and no shell stands between it and the command: lists, not strings."""
    for target in TARGETS:
        for instruction in ("ENTRYPOINT", "CMD"):
            text = _last(stages, target, instruction)
            try:
                words = json.loads(text)
            except json.JSONDecodeError:
                yield f"image {target}: {instruction} {text}: a shell would keep SIGTERM from the command; use a list"
                continue
            if instruction == "ENTRYPOINT" and words != ["/usr/bin/tini", "--"]:
                yield f'image {target}: ENTRYPOINT {text}: process 1 must pass signals on; use ["/usr/bin/tini", "--"]'


def secrets_stay_out(stages: dict[str, Stage]) -> Iterator[str]:
    """What ARG and ENV hold can be read in the image's history."""
    for stage in stages.values():
        for line, text in stage.all("ARG") + stage.all("ENV"):
            for pair in shlex.split(text):
                if _SECRET.search(_name(pair)):
                    yield f"line {line}: {_name(pair)} would be in the image's history; use RUN --mount=type=secret"


def kernels_lie_where_they_are_looked_for(stages: dict[str, Stage]) -> Iterator[str]:
    """The variables of the image name what was copied into it, by the same paths as in the stage that baked it."""
    copied = [text.split() for _, text in stages["training"].all("COPY") if "--from=kernels" in text]
    variables = dict(
        pair.split("=", 1)
        for stage in lineage(stages, "training")
        for _, text in stage.all("ENV")
        for pair in shlex.split(text)
    )
    for name in ("STRATA_BAKED_KERNELS", "TRITON_LIBCUDA_PATH"):
        folder = variables.get(name)
        if ["--from=kernels", folder, folder] not in copied:
            yield f"image training: {name} is {folder}, which is not copied there from stage kernels"
    if stages["kernels"].base != stages["training"].base:
        yield "stage kernels is not built from what image training is: its keys would be of another compiler"


RULES: tuple[Callable[[dict[str, Stage]], Iterator[str]], ...] = (
    images_are_pinned,
    packages_are_pinned,
    apt_leaves_nothing,
    sources_are_copied,
    variables_are_declared,
    nothing_runs_as_root,
    signals_arrive,
    secrets_stay_out,
    kernels_lie_where_they_are_looked_for,
)


def problems(text: str) -> list[str]:
    """What is wrong with a Dockerfile. Raises ValueError for a stage without a name."""
    stages = read(text)
    missing = [f"there is no stage {name}" for name in (*TARGETS, "kernels") if name not in stages]
    return missing or [problem for rule in RULES for problem in rule(stages)]


def execute(stages: dict[str, Stage], name: str, root: Path, given: dict[str, str]) -> Iterator[str]:
    """Run a stage's own COPY and RUN with `root` in place of the image's root; yields what is done and left out.

    Variables are those of the stages that it is built from, too, whose steps are not run. Commands are found in the
    folder of this Python, then on PATH.

    Raises:
        subprocess.CalledProcessError: a step failed.
    """
    values: dict[str, str] = {}
    here = root
    for stage in reversed(lineage(stages, name)):
        for _, instruction, text in stage.steps:
            text = _ABSOLUTE.sub(lambda path: f"{root}{path[0]}", text)
            if instruction == "ENV":
                values |= dict(pair.split("=", 1) for pair in shlex.split(text) if _name(pair) != "PATH")
            elif instruction == "ARG":
                variable, _, value = text.partition("=")
                values[variable] = given.get(variable, value)
            elif instruction == "WORKDIR":
                here = root / text.lstrip("/") if not text.startswith(str(root)) else Path(text)
            elif stage.name == name and instruction == "COPY" and "--from=" not in text:
                yield f"COPY {text}"
                _copy(text, here)
            elif stage.name == name and instruction == "RUN":
                if _AS_ROOT.search(text):
                    yield f"left out, it needs root: RUN {text}"
                    continue
                yield f"RUN {text}"
                here.mkdir(parents=True, exist_ok=True)
                path = f"{root}/opt/strata/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
                environment = {**os.environ, **values, "PATH": path}
                subprocess.run(["/bin/sh", "-ec", text], cwd=here, env=environment, check=True)


def _copy(text: str, here: Path) -> None:
    destination = [word for word in text.split() if not word.startswith("--")][-1]
    for source in _sources(text):
        place = here / destination / Path(source).name if destination.endswith("/") else here / destination
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, place)


def main() -> int:
    """Exit code 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execute", nargs=2, metavar=("STAGES", "DIR"), help="run the steps of stages in a folder")
    parser.add_argument("--set", action="append", default=[], metavar="ARG=VALUE", help="as --build-arg")
    given = parser.parse_args()
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    found = problems(text)
    for problem in found:
        print(f"Dockerfile: {problem}", file=sys.stderr)
    if given.execute and not found:
        stages, folder = read(text), Path(given.execute[1]).resolve()
        for name in given.execute[0].split(","):
            if name not in stages:
                parser.error(f"no stage {name!r}; there are {', '.join(stages)}")
            for step in execute(stages, name, folder, dict(pair.split("=", 1) for pair in given.set)):
                print(step, flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
