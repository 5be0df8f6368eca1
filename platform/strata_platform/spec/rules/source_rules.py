"""Rules for the sources of the data: fields that contradict each other, and sources that cannot be mixed."""

from __future__ import annotations

from collections.abc import Iterator

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.data import Data, MixtureSource, Reading, ValidationSource


def source_rules(data: Data) -> Iterator[Contradiction]:
    """Every rule about `data.sources` and validation sources, broken or not."""
    yield from _one_or_several(data)
    yield from _columns("data", data)
    yield from _limits("data", data)
    yield from _validation("data", data)
    for index, source in enumerate(data.sources):
        yield from _validation(f"data.sources[{index}]", source)
        yield from _columns(f"data.sources[{index}]", source)
        yield from _limits(f"data.sources[{index}]", source)
        yield _duplicate(data, index)
    yield from _weights(data)
    yield from _templates(data)


def _one_or_several(data: Data) -> Iterator[Contradiction]:
    yield Contradiction(
        data.source is not None and bool(data.sources),
        ("data.source", "data.sources"),
        f"set, but data.sources names {len(data.sources)} sources; leave data.source out, or make it one of them",
    )
    yield Contradiction(
        data.source is None and not data.sources,
        ("data.source", "data.sources"),
        "null, and data.sources names none; give one of them",
    )
    yield from (
        Contradiction(
            value is not None and bool(data.sources),
            (f"data.{field}", "data.sources"),
            f"set, but it belongs to one Hub data set, and data.sources names {len(data.sources)} sources; give it in "
            f"the source that it belongs to, as data.sources[0].{field}",
        )
        for field, value in (("subset", data.subset), ("revision", data.revision))
    )


def _columns(path: str, section: Reading) -> Iterator[Contradiction]:
    """A column that is two things at once: what it teaches is to repeat."""
    for first, second in (("prompt_column", "completion_column"), ("chosen_column", "rejected_column")):
        name = getattr(section, first)
        yield Contradiction(
            name is not None and name == getattr(section, second),
            (f"{path}.{first}", f"{path}.{second}"),
            f"{name!r}, as {path}.{second}, so that the model would learn to repeat it; name another column",
        )


def _limits(path: str, section: Reading) -> Iterator[Contradiction]:
    """Limits of images and audio that leave none."""
    for least, most in (("image_min_pixels", "image_max_pixels"), ("audio_min_seconds", "audio_max_seconds")):
        low, high = getattr(section, least), getattr(section, most)
        yield Contradiction(
            None not in (low, high) and low > high,
            (f"{path}.{least}", f"{path}.{most}"),
            f"{low}, more than {path}.{most} {high}; lower it, or raise {path}.{most}",
        )


def _templates(data: Data) -> Iterator[Contradiction]:
    sections: list[tuple[str, Reading]] = [
        (f"data.sources[{index}]", source) for index, source in enumerate(data.sources)
    ]
    sections = sections or [("data", data)]
    yield Contradiction(
        data.chat_template is not None and all(section.template is not None for _, section in sections),
        (f"{sections[0][0]}.template", "data.chat_template"),
        "renders prompts without a chat template, and data.chat_template renders chats; leave one of them out",
    )
    yield from (
        Contradiction(
            section.template is not None and section.format not in ("auto", "prompt_completion", "alpaca"),
            (f"{path}.template", f"{path}.format"),
            f"renders rows with one question and one answer, but {path}.format is '{section.format}'; leave "
            f"{path}.template out, or set {path}.format to 'prompt_completion' or 'alpaca'",
        )
        for path, section in sections
    )


def _validation(path: str, section: Data | MixtureSource) -> Iterator[Contradiction]:
    validation = section.validation_source
    if validation is None:
        return
    field = f"{path}.validation_source"
    # With several sources, it is evaluated beside what each of them holds out.
    several = isinstance(section, Data) and bool(section.sources)
    yield Contradiction(
        section.validation_fraction > 0 and not several,
        (field, f"{path}.validation_fraction"),
        f"names rows for evaluation, and {path}.validation_fraction {section.validation_fraction} holds samples out, "
        "too; leave one of them out",
    )
    yield Contradiction(
        validation.source is None,
        (field, "data.sources"),
        "names no source, and data.sources has several that it could mean; give its source, or put it into the source "
        "that it belongs to",
    )
    yield Contradiction(
        _same_rows(validation, section),
        (field, path),
        f"names the rows that {path} trains on; set its split or its source",
    )


def _same_rows(validation: ValidationSource, section: Data | MixtureSource) -> bool:
    return (validation.source, validation.subset, validation.split) == (
        section.source,
        section.subset,
        section.split,
    ) and validation.source is not None


def _duplicate(data: Data, index: int) -> Contradiction:
    source = data.sources[index].model_copy(update={"weight": None})
    earlier = [other.model_copy(update={"weight": None}) for other in data.sources[:index]]
    first = earlier.index(source) if source in earlier else 0
    return Contradiction(
        source in earlier,
        (f"data.sources[{index}]", f"data.sources[{first}]"),
        f"the same as data.sources[{first}]; leave it out, and raise the weight of data.sources[{first}] to draw more "
        "of it",
    )


def _weights(data: Data) -> Iterator[Contradiction]:
    without = [index for index, source in enumerate(data.sources) if source.weight is None]
    if without and len(without) < len(data.sources):
        index = without[0]
        other = next(at for at, source in enumerate(data.sources) if source.weight is not None)
        yield Contradiction(
            True,
            (f"data.sources[{index}].weight", f"data.sources[{other}].weight"),
            f"not set, but data.sources[{other}].weight is {data.sources[other].weight:g}; give every source a weight, "
            "or none, which draws each row of every source once an epoch",
        )
