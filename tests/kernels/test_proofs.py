"""Proofs of equality that an earlier call or process has made: when they hold, and when they are made again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from transformers.loss import loss_utils
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from triton import knobs

from strata_kernels import patch_model
from strata_kernels.patch import discover, proofs
from strata_kernels.patch.table import OPERATORS
from tests.kernels.test_discover import build_other, other_family


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A process that starts with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(proofs, "_known", {})
    return tmp_path / ".strata-proofs"


START = """
import sys, torch
from tests.kernels.test_discover import build_other
from strata_kernels import patch_model
for model_type in sys.argv[1:]:
    report = patch_model(build_other(model_type))
    print(*report.proofs, report.summary(), sep="|")
"""


def test_a_second_process_makes_no_proof_again(folder) -> None:
    """Another process has other addresses, and another order of sets."""
    types = ["gpt_oss", "llama4_text", "deepseek_v3"]
    reports = [patch_model(build_other(model_type)) for model_type in types]
    assert all(report.proofs[0] > 3 and report.proofs[1] == 0 for report in reports)
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", START, *types], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if "|" in line]
    assert lines == [f"0|{report.proofs[0]}|{report.summary()}" for report in reports]


def test_what_was_read_from_disk_is_what_was_proven(monkeypatch) -> None:
    types = ["qwen3_moe", "gpt_oss", "cohere", "llama4_text", "nemotron", "phimoe", "deepseek_v3"]
    models = [build_other(model_type) for model_type in types]
    made = [discover.discover(model, OPERATORS) for model in models]
    monkeypatch.setattr(proofs, "_known", {})
    for name in ("_prove_norm", "_prove_mlp", "prove_experts", "prove_rope", "prove_head"):
        monkeypatch.setattr(discover, name, None)
    for model, expected in zip(models, made, strict=True):
        found = discover.discover(model, OPERATORS)
        assert (found.replacements, found.kept) == (expected.replacements, expected.kept)
        assert found.proofs == expected.proofs[::-1]


def _halved(x):
    return 0.5 * x


def rotated_otherwise(monkeypatch):
    """The function that the rotation calls, written as if it were the family's."""
    original = modeling_cohere.rotate_half
    code = compile("def rotate_half(x):\n    return 0.5 * x", modeling_cohere.__file__, "exec")
    exec(code, vars(modeling_cohere))
    replaced = modeling_cohere.rotate_half
    modeling_cohere.rotate_half = original
    monkeypatch.setattr(modeling_cohere, "rotate_half", replaced)


@pytest.mark.parametrize(
    "replace",
    [rotated_otherwise, lambda monkeypatch: monkeypatch.setattr(modeling_cohere, "rotate_half", _halved)],
    ids=["by its own", "by another's"],
)
def test_code_that_was_replaced_is_proven_again(replace, monkeypatch) -> None:
    model = build_other("cohere")
    assert "rope" in patch_model(model).replaced
    with monkeypatch.context() as patched:
        replace(patched)
        report = patch_model(model)
        assert "rotates in a way that rope does not know" in report.kept["rope"][0]
    report = patch_model(model)
    assert "rope" in report.replaced and report.proofs[0] == 0


def digest(model, operator="rms_norm", path="model.norm"):
    return proofs.digest_of(operator, model.get_submodule(path), model)


@pytest.mark.parametrize(
    ("operator", "path", "change"),
    [
        ("rms_norm", "model.norm", lambda model: setattr(model.model.norm, "variance_epsilon", 0.1)),
        (
            "rms_norm",
            "model.norm",
            lambda model: setattr(model.model.norm, "weight", model.lm_head.weight),
        ),
        ("swiglu", "model.layers.0.mlp", lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU())),
        ("rope", "model.layers.0.self_attn", lambda model: setattr(model.config, "rope_parameters", {"x": 1})),
        (
            "rope",
            "model.layers.0.self_attn",
            lambda model: setattr(
                model.model.rotary_emb, "inv_freq", nn.Parameter(model.model.rotary_emb._buffers.pop("inv_freq"))
            ),
        ),
        ("linear_cross_entropy", "", lambda model: setattr(model.config, "logits_scaling", 2.0)),
    ],
    ids=["attribute", "size", "child", "angles", "learned angles", "configuration"],
)
def test_what_a_proof_depends_on(operator, path, change) -> None:
    model = other_family()
    before = digest(model, operator, path)
    assert before == digest(other_family(), operator, path)
    change(model)
    assert digest(model, operator, path) != before


def test_of_other_sources_nothing_is_kept_and_layers_share_a_proof(monkeypatch) -> None:
    model = other_family()
    first, second = (digest(model, "rope", f"model.layers.{n}.self_attn") for n in (0, 1))
    assert first == second
    monkeypatch.setattr(proofs, "source_hash", lambda folder: "another version")
    assert digest(model, "rope", "model.layers.0.self_attn") != first


def test_a_proof_of_the_interpreter_is_no_proof_of_a_gpu() -> None:
    """It rounds otherwise: what it finds unequal may be equal."""
    model = other_family()
    compiled = digest(model)
    with knobs.runtime.scope():
        knobs.runtime.interpret = not knobs.runtime.interpret
        assert digest(model) != compiled
    assert digest(model) == compiled


@pytest.mark.parametrize(
    "code",
    [
        "def rotate_half(x, *, factor={}):\n    return x * factor",
        "def rotate_half(x, factor={}):\n    return x * factor",
    ],
    ids=["keyword", "positional"],
)
def test_a_default_is_code(code, monkeypatch) -> None:
    model, found = build_other("cohere"), []
    monkeypatch.setattr(modeling_cohere, "rotate_half", None)
    for factor in (0.5, 0.25):
        exec(compile(code.format(factor), modeling_cohere.__file__, "exec"), vars(modeling_cohere))
        found.append(digest(model, "rope", "model.layers.0.self_attn"))
    assert None not in found and found[0] != found[1]


def test_a_loss_that_was_replaced_is_proven_again(monkeypatch) -> None:
    model = other_family()
    before = digest(model, "linear_cross_entropy", "")
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *args, **kwargs: 0.0)
    assert before is not None and digest(model, "linear_cross_entropy", "") is None


class OwnRMSNorm(modeling_llama.LlamaRMSNorm):
    pass


def test_code_from_elsewhere_is_proven_each_time(folder) -> None:
    model = other_family(LlamaRMSNorm=OwnRMSNorm)
    assert digest(model) is None
    for _ in range(2):
        report = patch_model(model)
        assert "rms_norm" in report.replaced and report.proofs[0] >= 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(""),
        lambda file: file.write_text(json.dumps({"recipe": "Row", "fields": {}})),
        lambda file: file.write_text(json.dumps({"recipe": "Head", "fields": {"output": ["os", "system"]}})),
        lambda file: file.unlink() or file.mkdir(),
    ],
    ids=["empty", "unknown", "another module", "folder"],
)
def test_a_damaged_file_costs_a_proof(damage, folder, monkeypatch) -> None:
    expected = patch_model(build_other("cohere"))
    files = list(folder.iterdir())
    assert len(files) == expected.proofs[0]
    for file in files:
        damage(file)
    monkeypatch.setattr(proofs, "_known", {})
    report = patch_model(build_other("cohere"))
    assert report == expected and report.proofs == expected.proofs


def test_a_folder_that_cannot_be_written_costs_proofs(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert patch_model(build_other("cohere")).proofs[1] == 0
    assert patch_model(build_other("cohere")).proofs[0] == 0


def test_proofs_lie_where_triton_has_its_kernels(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    made, _ = patch_model(build_other("cohere")).proofs
    assert made == len(list((tmp_path / "home" / ".triton" / "cache" / ".strata-proofs").iterdir())) > 0


def test_the_report_says_so() -> None:
    patch_model(build_other("nemotron"))
    report = patch_model(build_other("nemotron"))
    assert report.proof_summary() == "proofs of equality: 0 made now, 4 from an earlier start"
