"""Every model type that Liger-Kernel knows computes the same, and docs/model-families.md says what is fused in it."""

import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoProcessor

from strata_kernels import patch_model, unpatch_model
from strata_kernels.__main__ import main
from strata_kernels.compat.liger.families import FAMILY_OF
from strata_kernels.patch import table
from strata_kernels.patch.table import ROWS
from tasks.runtime.models.config import BROKEN_IN
from tests.kernels.helpers.model_equality import assert_equal_when_patched
from tests.kernels.helpers.tiny_models import VOCABULARY, build_tiny, with_random_weights
from tests.runtime.helpers import vision_models
from tests.runtime.helpers.pictures import picture

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
# Model type → operators that are fused, and those that keep their own code somewhere.
LISTED = re.findall(r"^\| `(\w+)`[^|]* \| ([^|]*) \| (—|`[^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
TABLE = {row[0]: (re.findall(r"\w+", row[1]), re.findall(r"`(\w+)`", row[2])) for row in LISTED}


# Types without a row, of other libraries' lists: dense, mixtures, hybrids.
OTHERS = (
    "cohere", "cohere2", "gpt2", "gpt_neox", "olmo", "openai-gpt", "phi", "stablelm", "starcoder2",
    "afmoe", "ernie4_5_moe", "glm4_moe", "granitemoe", "lfm2_moe", "olmoe", "phimoe", "qwen2_moe",
    "bamba", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax",
    "nemotron_h", "olmo_hybrid", "recurrent_gemma", "zamba2",
)  # fmt: skip


def skip_if_broken(family: str) -> None:
    if BROKEN_IN.get(family) == transformers.__version__:
        pytest.skip(f"transformers {transformers.__version__} cannot run it")


def step_on_text(model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss, and logits or hidden states."""
    tokens = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0)).to(model.device)
    if hasattr(model, "patch_conv"):
        # Pixtral, a tower.
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
        states = model(pixels, image_sizes=torch.tensor([[8, 8]])).last_hidden_state
    elif model.get_output_embeddings() is None:
        states = model(input_ids=tokens, use_cache=False).last_hidden_state
    else:
        return step_with_labels(model, tokens)
    return {"loss": states.square().mean(dtype=torch.promote_types(states.dtype, torch.float32)), "states": states}


def step_with_labels(model: nn.Module, tokens: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = tokens.clone()
    labels[:, :4] = -100
    loss = model(input_ids=tokens, labels=labels, use_cache=False, **inputs).loss
    with torch.no_grad():
        return {"loss": loss, "logits": model(input_ids=tokens, use_cache=False, **inputs).logits}


def test_the_page_lists_every_type_once() -> None:
    assert TABLE.keys() == FAMILY_OF.keys() | ROWS.keys() and len(TABLE) == len(LISTED)


def test_no_type_has_two_rows() -> None:
    """A dictionary of rows would keep the last one without a word."""
    assert re.findall(r'\bRow\("(\w+)"', Path(table.__file__).read_text(encoding="utf-8")) == list(ROWS)


@pytest.mark.parametrize("model_type", sorted({*FAMILY_OF, *ROWS, *OTHERS}))
def test_type(model_type, device) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    skip_if_broken(model_type)
    report = assert_equal_when_patched(build_tiny(model_type).to(device), step_on_text)
    if model_type in OTHERS:
        assert report.by_structure and not report.unsupported
    else:
        assert (list(report.replaced), list(report.kept)) == TABLE[model_type]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_type_with_an_image(family, tmp_path, device) -> None:
    skip_if_broken(family)
    vision_models.FAMILIES[family](tmp_path)
    model = with_random_weights(AutoModelForImageTextToText.from_pretrained(tmp_path)).train()
    inputs = vision_models.inputs_of(AutoProcessor.from_pretrained(tmp_path), [picture("cross", random.Random(0))])

    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        given = {name: x.to(model.device, model.dtype if x.is_floating_point() else None) for name, x in inputs.items()}
        return step_with_labels(model, given.pop("input_ids"), **given)

    report = assert_equal_when_patched(model.to(device), step)
    assert len(report.replaced) > 3


def test_unpatching_leaves_nothing() -> None:
    for model_type in TABLE:
        model = build_tiny(model_type)
        patch_model(model)
        unpatch_model(model)
        assert not [m for m in model.modules() if "_strata_original" in vars(type(m))], model_type


def test_the_command_prints_the_table_and_what_is_fused_in_a_type(capsys) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:-2]] == list(ROWS)
    assert "capped at final_logit_softcapping" in next(line for line in printed if line.startswith("gemma2 "))
    assert main(["models", "starcoder2"]) == 0
    assert capsys.readouterr().out.startswith(
        "starcoder2 (by structure): layer_norm x61, rope x30, gelu x30, linear_cross_entropy x1"
    )
    assert main(["models", "lama"]) == 2
    assert "has no model type 'lama'" in capsys.readouterr().err
