"""Load pretrained weights that are exactly those of the model: none is left random, and none is left out.

transformers gives a tensor that the folder lacks random values, passes over one that the model lacks, and logs a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from strata_platform.file_io import require_regular_files
from strata_platform.model_config import read_config_file
from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.model import SCORE, Model
from strata_platform.spec.sections.objectives import Distill, Grpo
from tasks.runtime.models.media.multimodal import AUDIO_FAMILIES
from tasks.runtime.models.score_head import class_of, initialize, options_of, require_one_score
from tasks.runtime.models.weight_files import open_tensors, some_values
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.hub import asking_hub

_EXPECTED_ERRORS = (OSError, ImportError, ValueError, SafetensorError)
# What transformers says of a configuration that an automatic class has no model for, before it lists all that it knows.
_NO_CLASS = re.compile(
    r"Unrecognized configuration class <class '(?:\w+\.)*(?P<config>\w+)'> for this kind of AutoModel: (?P<auto>\w+)"
)
# Names of tensors that an error lists.
_SHOWN = 3
# Seconds that the Hub has to answer before an error goes without advice; its client would wait forever.
_ADVICE_TIMEOUT = 5.0
# Files of weights, be they of another framework, and the lists of their parts.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"}


def load_pretrained(
    source: str, *, allow_extra: bool = False, head: str = "tokens", seed: int | None = 0, **options: Any
) -> PreTrainedModel:
    """`auto_class(config).from_pretrained(source, **options)` from safetensors; every tensor has its place.

    Tied weights, and tensors that the model class names in `_keys_to_ignore_on_load_missing` and `..._unexpected`, are
    no problem.

    Args:
        source: a folder, or a model on the Hub.
        head: `Model.head` of the spec. With "score" the class is `AutoModelForSequenceClassification`, and a head of
            tokens in the source is left out; a head that it lacks gets random values.
        seed: of these values; None for a source that must have the head.
        allow_extra: tensors that the model lacks are no problem either, as those of layers that were cut off.
        options: further arguments of `from_pretrained`. With `device_map="meta"` only headers are read, and some values
            of tied tensors.

    Raises:
        ValueError: the model cannot be read; it is an adapter, which transformers would load with its base model; or
            its tensors are not those that its config.json describes.
        Unreachable: the Hub does not answer.
    """
    with readable(source):
        config = AutoConfig.from_pretrained(source, revision=options.get("revision"), trust_remote_code=False)
        model, found = class_of(head, config).from_pretrained(
            source,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Reported below, with the other differences.
            ignore_mismatched_sizes=True,
            **options_of(head),
            **options,
        )
    if hasattr(model, "peft_config"):
        raise _is_adapter(source)
    if head == "score":
        require_one_score(source, config, trained=seed is None)
    shapes = [f"{name} {list(held)}, not {list(wanted)}" for name, held, wanted in sorted(found["mismatched_keys"])]
    extra = [] if allow_extra else sorted(found["unexpected_keys"])
    missing = sorted(found["missing_keys"])
    if head == "score":
        # Whatever lies beside the layers is the head of tokens.
        extra = [name for name in extra if name.startswith(f"{model.base_model_prefix}.")]
        if seed is not None and missing == [f"{SCORE}.weight"]:
            missing = []
            initialize(model, seed)
    differences = [
        _listed(missing, "tensors are missing"),
        _listed(extra, "tensors are not part of the model"),
        _listed(shapes, "tensors have other shapes"),
    ]
    if any(differences):
        raise ValueError(
            f"model.name {source!r}: its weights are not those of the model that its config.json describes: "
            f"{'; '.join(filter(None, differences))}. Correct config.json, or fetch the folder's files again; a run "
            "would train random values or leave weights out"
        )
    _require_tied(model, source)
    return model


def _require_tied(model: PreTrainedModel, source: str) -> None:
    """Raises ValueError if the weights have values of their own for what config.json ties.

    transformers leaves these untied, and compares no tensors on the meta device. A model that is built of config.json
    alone, as by other ranks, a resumed run and the export, has one tensor for both.
    """
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = tied.keys() - model.all_tied_weights_keys.keys()
    if model.device.type == "meta" and Path(source).is_dir():
        apart |= _differing(tied, Path(source))
    if apart:
        download = "" if Path(source).is_dir() else "download it, give the folder as model.name, and there "
        pairs = ", ".join(f"{name} to {tied[name]}" for name in sorted(apart))
        raise ValueError(
            f"model.name {source!r}: its config.json ties {pairs}, but its weights have other values for "
            f"each; {download}set tie_word_embeddings to false in config.json if both are meant, or remove the tensor "
            "that is not"
        )


def _differing(tied: Mapping[str, str], folder: Path) -> set[str]:
    """The keys of `tied` whose tensor in the folder differs from that of the name that it is tied to.

    Compares some values, in bf16: what differs there differs in the dtype of any run.
    """
    with ExitStack() as opened:
        tensors = open_tensors(folder, opened)

        def values(name: str) -> Tensor | None:
            # transformers renames tensors of some families, all but the end.
            end = "." + ".".join(name.split(".")[-2:])
            found = [held for held in tensors if held == name] or [held for held in tensors if f".{held}".endswith(end)]
            return some_values(tensors[found[0]], found[0]).to(torch.bfloat16) if len(found) == 1 else None

        read = {name: (values(name), values(source)) for name, source in tied.items()}
    return {
        name
        for name, (own, other) in read.items()
        if own is not None and other is not None and not torch.equal(own, other)
    }


def _listed(names: list[str], meaning: str) -> str:
    """`21 tensors are missing (a, b, c, ...)`; empty if there are none."""
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {meaning} ({', '.join(names[:_SHOWN])}{more})" if names else ""


def _is_adapter(source: str) -> ValueError:
    return ValueError(
        f"model.name {source!r} is an adapter, not a model; merge it into its model with PEFT's merge_and_unload, save "
        "that, and give its folder; or give the folder of its model, and start from the adapter by adapter.init_from"
    )


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn errors of transformers into a ValueError that names the model; an unreachable Hub stays `Unreachable`."""
    if Path(source, "adapter_config.json").is_file() and not Path(source, "config.json").is_file():
        raise _is_adapter(source)
    try:
        require_regular_files(Path(source))
        if (file := Path(source, "config.json")).is_file():
            read_config_file(file)
        with asking_hub(f"model.name {source!r}"):
            yield
    except (Unreachable, torch.OutOfMemoryError):
        raise
    # Wrong settings and torn files cause errors of any type.
    except Exception as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, _EXPECTED_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        if "trust_remote_code" in reason:
            raise ValueError(
                f"model.name {source!r} contains Python code, which runs only if model.trust_remote_code names it: "
                "read the code, and see docs/remote-code.md"
            ) from error
        if unknown := _NO_CLASS.search(reason):
            raise ValueError(
                f"model.name {source!r}: {unknown['auto']} of transformers has no model with a {unknown['config']}; "
                "choose one that writes texts, or texts about images or audio; of those that take audio alone, "
                f"{' and '.join(AUDIO_FAMILIES)} are supported"
            ) from error
        raise ValueError(
            f"model.name {source!r} cannot be read: {reason}; give the name of a model on the Hub, or a folder with "
            "its config.json and weights as safetensors"
        ) from error


@contextmanager
def advising_random_weights(source: str, revision: str | None = None) -> Iterator[None]:
    """Add to the error of a `model.name` without any weights that it can be trained from scratch."""
    try:
        yield
    except ValueError as error:
        # transformers did not find a file.
        if isinstance(error.__cause__, OSError) and _has_no_weights(source, revision):
            raise ValueError(f"{error}; to train from scratch, set model.init to 'random'") from error
        raise


def _has_no_weights(source: str, revision: str | None) -> bool:
    """Whether a folder, or a model on the Hub, has no file of weights. False where the Hub does not tell."""
    if Path(source).is_dir():
        names = [path.name for path in Path(source).iterdir()]
    else:
        try:
            files = HfApi().model_info(source, revision=revision, timeout=_ADVICE_TIMEOUT).siblings
            names = [file.rfilename for file in files or ()]
        # The client's errors have no common base class, and it was asked for advice alone.
        except Exception:
            return False
    return _WEIGHTS.isdisjoint(suffix for name in names for suffix in Path(name).suffixes)


def require_complete_weights(model: Model, objective: Objective) -> None:
    """Raises ValueError if the weights in a local folder are not those of its model. Reads headers, and some
    values of tied tensors.

    Checks `model.name`, `objective.teacher` and reward models. Models on the Hub are checked when they are loaded.
    """
    folders: dict[str, tuple[str | None, dict[str, Any]]] = {}
    if not model.from_scratch:
        folders["model.name"] = model.name, {"head": model.head}
    if isinstance(objective, Distill):
        folders["objective.teacher"] = objective.teacher, {}
    if isinstance(objective, Grpo):
        scoring = {"head": "score", "seed": None}
        folders |= {f"objective.rewards[{n}].model": (term.model, scoring) for n, term in enumerate(objective.rewards)}
    for field, (folder, options) in folders.items():
        if folder is not None and Path(folder).is_dir():
            try:
                with advising_random_weights(folder) if field == "model.name" else nullcontext():
                    load_pretrained(folder, device_map="meta", **options)
            except ValueError as error:
                if field == "model.name":
                    raise
                raise ValueError(f"{field}: {error}") from error
