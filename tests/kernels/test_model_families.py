"""Every model type that Liger-Kernel knows computes the same, and docs/model-families.md says what is fused in it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from strata_kernels import patch_model, unpatch_model
from strata_kernels.__main__ import main
from strata_kernels.compat.liger.families import FAMILY_OF
from strata_kernels.patch import table
from strata_kernels.patch.table import ROWS
from tests.kernels.helpers.tiny_models import VOCABULARY, build_tiny

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
# Model type → operators that are fused, and those that keep their own code somewhere.
LISTED = re.findall(r"^\| `(\w+)`[^|]* \| ([^|]*) \| (—|`[^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
TABLE = {row[0]: (re.findall(r"\w+", row[1]), re.findall(r"`(\w+)`", row[2])) for row in LISTED}


def run(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits or hidden states, and the gradients of all parameters that the loss reaches."""
    model.zero_grad()
    if hasattr(model, "lm_head") or hasattr(model, "language_model"):
        labels = tokens.clone()
        labels[:, :4] = -100
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        with torch.no_grad():
            result = model(input_ids=tokens, use_cache=False).logits
    elif not hasattr(model, "patch_conv"):
        result = model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = result.square().mean()
    else:
        # Pixtral, a tower.
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        result = model(pixels, image_sizes=torch.tensor([[8, 8]])).last_hidden_state
        loss = result.square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), result.detach(), gradients


def test_the_page_lists_every_type_once() -> None:
    assert TABLE.keys() == FAMILY_OF.keys() | ROWS.keys() and len(TABLE) == len(LISTED)


def test_no_type_has_two_rows() -> None:
    """A dictionary of rows would keep the last one without a word."""
    assert re.findall(r'\bRow\("(\w+)"', Path(table.__file__).read_text(encoding="utf-8")) == list(ROWS)


@pytest.mark.parametrize("model_type", sorted(FAMILY_OF))
def test_type(model_type) -> None:
    model = build_tiny(model_type)
    tokens = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
    loss, result, gradients = run(model, tokens)
    report = patch_model(model)
    assert (list(report.replaced), list(report.kept)) == TABLE[model_type]
    patched_loss, patched_result, patched_gradients = run(model, tokens)
    torch.testing.assert_close(patched_loss, loss, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(patched_result, result, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(patched_gradients, gradients, atol=2e-5, rtol=1e-3)
    assert len(gradients) > 5
    unpatch_model(model)
    assert not [m for m in model.modules() if "_strata_original" in vars(type(m))]


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
