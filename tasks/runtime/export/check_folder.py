"""Read an exported model as its users would, and compare it with the trained model.

The comparison runs in a separate process, which gets nothing from training except the folder.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from strata_platform.spec.sections.model import Model
from tasks.runtime.data.media.media_processor import saved_processor
from tasks.runtime.export.gguf_families import FAMILIES
from tasks.runtime.export.quantized_folder import read_quantized
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.custom_code import register_custom_code
from tasks.runtime.models.media.media_inputs import sample_inputs
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.models.score_head import head_of
from tasks.runtime.process.forks import run_module

if TYPE_CHECKING:
    from torch import Tensor

MEDIA_LOGITS = "media_logits"
"""The result for a picture or a sound, if the model was trained on images or audio."""
# Tokens of the compared text.
TOKENS = 64
# Largest difference of logits relative to the largest logit, by dtype. Equal arithmetic in equal order differs by 0.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_TEXT = (
    "The exported model must read this text as the trained one did: the same tokens, and for each of them the same "
    "expectation of what comes next, whatever was merged, cast or renamed on the way to the folder. 0123456789 {}[]()\n"
)


class Rounding(NamedTuple):
    """How far a type of stored weights may be from the trained model.

    Attributes:
        weights: largest difference of a matrix's value, relative to the largest value of its row.
        logits: largest difference of logits, relative to the largest logit.
    """

    weights: float
    logits: float


# Weights: half of the distance between two values of a type, at the largest value of a row or a block. Vectors are
# exact. The scale of a block of q8_0 is rounded, too.
ROUNDING = {
    "f32": Rounding(0.0, 1e-4),
    "f16": Rounding(2**-11, 1e-2),
    "bf16": Rounding(2**-8, 5e-2),
    "q8_0": Rounding(1 / 220, 5e-2),
    # Logits also differ by the inputs of layers, which are rounded as well.
    "fp8": Rounding(1 / 15.9, 0.25),
    "int4": Rounding(1 / 14.9, 1.0),
}
# Settings that transformers' reader of GGUF files leaves at its own default in some families.
_UNREAD_SETTINGS = (
    "rope_parameters", "head_dim", "sliding_window", "attention_bias", "mlp_bias", "query_pre_attn_scalar",
    "moe_intermediate_size", "norm_topk_prob", "attn_logit_softcapping", "final_logit_softcapping", "layer_types",
)  # fmt: skip
# Experts, which transformers holds together: gate and up in one tensor.
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def expected_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """The model's result for a short text: `input_ids` [1, T] and `logits` [1, T, V], on the CPU."""
    return _results(model, tokenizer(_TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :TOKENS])


def _results(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids.to(model.device)).logits
    return {"input_ids": ids, "logits": logits.cpu().contiguous()}


def tolerance_of(expected: dict[str, Tensor]) -> float:
    """Largest difference of logits by rounding, relative to the largest logit."""
    return _TOLERANCE[expected["logits"].dtype]


def media_results(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The model's result for a picture or sound, by the processor in `folder`: `media_logits` [1, T, V], on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    processor = saved_processor(folder, tokenizer)
    assert processor is not None, f"{folder} has no processor"
    content, stands = processor.example()
    ids = torch.tensor([stands + processor.encode(_TEXT[:40])])
    inputs = sample_inputs(processor, model, ids, [content])
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids.to(model.device), **inputs).logits
    return {MEDIA_LOGITS: logits.cpu().contiguous()}


def difference(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float | None = None) -> str | None:
    """A description of the difference; None if there is none beyond `tolerance`, by default that of rounding."""
    for name in expected:
        if expected[name].shape != found[name].shape or expected[name].dtype != found[name].dtype:
            return f"{name} are {_form(found[name])}, not {_form(expected[name])}"
    if not torch.equal(expected["input_ids"], found["input_ids"]):
        return "the tokenizer makes other tokens of a text"
    tolerance = tolerance_of(expected) if tolerance is None else tolerance
    for name, what in (("logits", "logits"), (MEDIA_LOGITS, "logits of a picture or a sound")):
        if name in expected:
            wanted, got = expected[name].float(), found[name].float()
            most, allowed = float((wanted - got).abs().max()), tolerance * float(wanted.abs().max())
            # Written so that NaN counts as a difference.
            if not most <= allowed:
                return f"{what} differ by {most:.3g}, and by rounding at most by {allowed:.2g}"
    return None


def verify(
    folder: Path,
    expected: dict[str, Tensor],
    device: torch.device,
    attention: str,
    *,
    file: str = "",
    stored: str = "",
    runs_code: bool = False,
) -> str:
    """Read a model in another process and compare it with `expected`.

    Args:
        folder: a Hugging Face folder.
        expected: the trained model's results, of `expected_of`.
        device: where the other process computes.
        attention: the spec's `model.attention`.
        file: a GGUF file or a folder of quantized weights in the folder, which is read in place of its safetensors, and
            compared with them.
        stored: the type of its matrices, a key of ROUNDING.
        runs_code: run the code in the folder, a copy of what `model.trust_remote_code` names.

    Returns:
        How close the two are, for a log.

    Raises:
        ValueError: the process reads another model than `expected` describes.
    """
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(temporary) / "expected.safetensors"
        save_file(expected, given)
        arguments = [str(folder), str(given), str(device), attention, file, stored, "code" if runs_code else ""]
        done = run_module("tasks.runtime.export.check_folder", arguments)
    if done.returncode == 0:
        wrong, close = json.loads(done.stdout.splitlines()[-1])
    else:
        wrong, close = f"it cannot be read (exit code {done.returncode}): {done.stderr.strip()[-2000:]}", ""
    if wrong is not None:
        raise ValueError(
            f"the exported model in {folder / file} is not the trained one: {wrong}. It replaces no earlier export, "
            "and the run's checkpoints are complete. Start the run again to export once more"
        )
    return str(close)


def closeness(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """How close two models' results are: the largest difference, and how many next tokens are the same."""
    wanted, got = expected["logits"].float(), found["logits"].float()
    share = float((wanted - got).abs().max() / wanted.abs().max())
    same = wanted.argmax(-1) == got.argmax(-1)
    return f"logits within {share:.2g} of the largest, {int(same.sum())} of {same.numel()} next tokens the same"


def weights_apart(folder: Path, model: PreTrainedModel, bound: float) -> str | None:
    """A description of the first weight of `model` that is further from the folder's than rounding takes it.

    `bound`: largest difference of a matrix's value, relative to the largest value of its row.
    """
    found = model.state_dict()
    # A norm's weight is stored as 1 + weight in some families.
    offset = getattr(FAMILIES.get(model.config.model_type), "norm_offset", False)
    vectors = torch.tensor(2**-22 if offset else 0.0)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, a safetensors file is no mapping
                exact = tensors.get_tensor(name).float()
                apart = (_named(found, name).cpu().float() - exact).abs()
                allowed = bound * exact.abs().amax(-1, keepdim=True) if exact.ndim > 1 else vectors
                # f16 has no smaller value.
                if not bool((apart <= allowed + (2**-24 if bound else 0)).all()):
                    return f"{name} differs by {float(apart.max()):.3g}"
    return None


def _named(found: dict[str, Tensor], name: str) -> Tensor:
    """The tensor of a model with this name in a folder; experts have other names in a folder."""
    expert = _EXPERT.fullmatch(name)
    if expert is None or name in found:
        return found[name]
    path, index, kind = expert.groups()
    if kind == "down":
        return found[f"{path}.down_proj"][int(index)]
    gate, up = found[f"{path}.gate_up_proj"][int(index)].chunk(2)
    return gate if kind == "gate" else up


def read_gguf(folder: Path, file: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file in an exported folder, as transformers reads them."""
    exact = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    for name in _UNREAD_SETTINGS:
        if hasattr(config, name) and hasattr(exact, name):
            setattr(config, name, getattr(exact, name))
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, config=config, dtype=dtype, trust_remote_code=False
    )
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False)


def vocabulary_apart(exact: PreTrainedTokenizerBase, found: PreTrainedTokenizerBase) -> str | None:
    """A description of the first difference between two tokenizers; None if there is none.

    The pre-tokenizer is left out, because transformers does not read that of every GGUF file.
    """
    tokens = {index: token for token, index in found.get_vocab().items()}
    if other := [token for token, index in exact.get_vocab().items() if tokens.get(index) != token]:
        return f"the vocabulary has {len(other)} other tokens, such as {other[0]!r}"
    merges = [json.loads(t.backend_tokenizer.to_str())["model"]["merges"] for t in (exact, found)]
    if merges[0] != merges[1]:
        return "the merges of the tokenizer are others"
    return None


def _template_apart(tokenizer: PreTrainedTokenizerBase, file: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.chat_template")
    template = tokenizer.chat_template
    wanted = template.get("default") if isinstance(template, dict) else template
    return None if wanted == (field and field.contents()) else "the chat template is another"


def compare_gguf(
    folder: Path, expected: dict[str, Tensor], device: str, file: str, stored: str
) -> tuple[str | None, str]:
    """How a GGUF file differs from its folder and from `expected`, None if it does not; and how close the two are."""
    model, tokenizer = read_gguf(folder, file, expected["logits"].dtype)
    rounding = ROUNDING[stored]
    # Weights are rounded once more where the trained model is no float32.
    again = 0.0 if expected["logits"].dtype is torch.float32 else 2**-8
    wrong = weights_apart(folder, model, rounding.weights + again)
    own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    wrong = wrong or vocabulary_apart(own, tokenizer) or _template_apart(own, folder / file)
    found = _results(model.to(torch.device(device)), expected["input_ids"])
    tolerance = max(rounding.logits, _TOLERANCE[expected["logits"].dtype])
    return wrong or difference(expected, found, tolerance), closeness(expected, found)


def compare_quantized(folder: Path, expected: dict[str, Tensor], device: str, form: str) -> tuple[str | None, str]:
    """How the quantized folder `form` in `folder` differs from it and from `expected`; and how close the two are."""
    rounding = ROUNDING[form]
    again = 0.0 if expected["logits"].dtype is torch.float32 else 2**-8
    wrong = weights_apart(folder, read_quantized(folder / form, dequantized=True), rounding.weights + again)
    model = read_quantized(folder / form, dequantized=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / form, trust_remote_code=False)
    found = expected_of(model.to(torch.device(device)), tokenizer)
    return wrong or difference(expected, found, rounding.logits), closeness(expected, found)


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def main() -> None:
    """Print the difference, and how close the models are, as one line of JSON."""
    name, given, device, attention, file, stored, code = sys.argv[1:]
    register_custom_code(Model(name=name, trust_remote_code=bool(code)))
    folder, expected = Path(name), load_file(given)
    if file.endswith(".gguf"):
        wrong, close = compare_gguf(folder, expected, device, file, stored)
    elif file:
        wrong, close = compare_quantized(folder, expected, device, stored)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        attention = choose_attention(attention, config)
        model = load_pretrained(name, head=head_of(config), dtype="auto", attn_implementation=attention)
        found = expected_of(model.to(device), tokenizer)
        found |= media_results(model, folder) if MEDIA_LOGITS in expected else {}
        wrong = difference(expected, found)
        close = "" if wrong else closeness(expected, found)
    print(json.dumps((wrong, close)))


if __name__ == "__main__":
    main()
