"""Specs of small models that learn from images or audio."""

from strata_platform.spec import RunSpec


def media_spec(folder, name, model, source, **changes):
    """A run below `folder`; `changes` are fields of sections."""
    spec = {
        "name": name,
        "output": str(folder / "out"),
        "model": {"name": str(model)},
        "data": {"source": str(source), "sequence_length": 48, "packing": False, "validation_fraction": 0.02},
        "runtime": {"framework": "torch"},
        "evaluation": {"samples": 1, "max_new_tokens": 5},
        "tracking": {"report_to": []},
    }
    return RunSpec.model_validate(spec | {key: {**spec.get(key, {}), **value} for key, value in changes.items()})
