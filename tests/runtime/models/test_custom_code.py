"""A model that brings code of its own, in a local folder."""

import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from strata_platform.errors import SpecError
from strata_platform.file_io import folder_digest
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime.data import PreparedData, recipe_of
from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models import custom_code
from tasks.runtime.models.build import build_model
from tasks.runtime.models.config import load_config
from tasks.runtime.models.custom_code import code_of, register_custom_code
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.verification.subject import make_subject
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        # Another model than a Llama of the same weights.
        for layer in self.model.layers:
            layer.self_attn.scaling *= 2
"""

TWO = {
    "configuration_two.py": """
from transformers import LlamaConfig


class TwoConfig(LlamaConfig):
    model_type = "two"
""",
    "modeling_two.py": """
from transformers import LlamaForCausalLM
from .configuration_two import TwoConfig


class TwoForCausalLM(LlamaForCausalLM):
    config_class = TwoConfig
""",
}


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """transformers copies code into a folder of modules; also in processes that are started."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.setenv("HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        yield


def bring_code(folder, **changes):
    (folder / "modeling_mine.py").write_text(CODE)
    values = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    values |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto_map, **changes}
    (folder / "config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def mine(tmp_path_factory, narrowed):
    folder = tmp_path_factory.mktemp("mine")
    save_pretrained(folder)
    shutil.rmtree(folder / "made")
    bring_code(folder)
    return folder


def make_spec(mine, output, **sections):
    return RunSpec.model_validate(
        {
            "output": str(output),
            "model": {"name": str(mine), "trust_remote_code": folder_digest(mine)},
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {"steps": 2, "micro_batch_size": 2},
            "checkpoint": {"every": 1, "keep_last": 2},
            "evaluation": {"samples": 1, "max_new_tokens": 2, "max_batches": 1},
            "tracking": {"report_to": []},
            **sections,
        }
    )


def test_it_trains_resumes_evaluates_and_is_exported_with_its_code(mine, output):
    spec = make_spec(mine, output)
    record = train_spec(spec)
    assert record.code == {str(mine): folder_digest(mine)}
    again = train_spec(spec, 1)
    assert again.train_loss == record.train_loss
    folder = RunFolder.of(spec)
    data = PreparedData.load(data_folder(spec.output, recipe_of(spec)))
    weights = collect_weights(folder, spec.adapter, again)
    measured = evaluate(spec, again, data, weights)
    assert measured.eval_loss_after < measured.eval_loss_before
    export(spec, measured, data, weights)
    assert (folder.model / "modeling_mine.py").read_text() == CODE
    assert "modeling_mine.MineForCausalLM" in (folder.model / "config.json").read_text()
    model = build_model(spec.model, 0, weights=str(weights))
    exported = AutoModelForCausalLM.from_pretrained(folder.model, trust_remote_code=True)
    assert type(model).__name__ == type(exported).__name__ == "MineForCausalLM"
    ids = torch.arange(9)[None]
    assert torch.allclose(exported(ids).logits, model(ids).logits, atol=1e-5)
    # It is another model than a Llama of the same weights.
    llama = LlamaForCausalLM.from_pretrained(folder.model)
    assert not torch.allclose(llama(ids).logits, model(ids).logits, atol=1e-2)
    assert AutoTokenizer.from_pretrained(folder.model).eos_token


def test_the_small_model_of_a_verification_from_scratch_has_all_of_the_code(mine, tmp_path):
    folder = tmp_path / "two"
    shutil.copytree(mine, folder)
    auto_map = {"AutoConfig": "configuration_two.TwoConfig", "AutoModelForCausalLM": "modeling_two.TwoForCausalLM"}
    bring_code(folder, model_type="two", auto_map=auto_map, num_hidden_layers=4)
    (folder / "modeling_mine.py").unlink()
    for name, code in TWO.items():
        (folder / name).write_text(code)
    model = {"name": str(folder), "init": "random", "trust_remote_code": True}
    subject = make_subject(make_spec(mine, tmp_path, model=model), tmp_path / "subject", layers=2)
    assert subject.layers == (2, 4)
    assert type(build_model(subject.spec.model, 0)).__name__ == "TwoForCausalLM"


def test_without_the_field_no_code_runs(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "copy")
    bring_code(tmp_path / "copy", model_type="never-registered")
    (tmp_path / "copy" / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="contains Python code, which runs only if"):
        load_config(Model(name=str(tmp_path / "copy")))


def test_changed_code_is_refused_before_it_runs(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "copy")
    before = folder_digest(tmp_path / "copy")
    assert before == folder_digest(mine)
    (tmp_path / "copy" / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=f"is '{before}', but the Python files .* are '?sha256:") as caught:
        register_custom_code(Model(name=str(tmp_path / "copy"), trust_remote_code=before))
    assert folder_digest(tmp_path / "copy") in str(caught.value)
    commit = "0" * 40
    with pytest.raises(ValueError, match="but the Python files"):
        register_custom_code(Model(name=str(tmp_path / "copy"), revision=commit, trust_remote_code=commit))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "transformers has code of its own for model_type 'llama'"),
        ({"auto_map": {"AutoConfig": "modeling_mine.MineConfig"}, "model_type": "a"}, "no AutoModelForCausalLM"),
        ({"auto_map": {"AutoConfig": "org/other--mine.Config"}, "model_type": "b"}, "another repository, 'org/other'"),
        ({"auto_map": None, "model_type": "c"}, "names no AutoConfig in auto_map"),
    ],
)  # fmt: skip
def test_code_that_the_field_does_not_name(mine, tmp_path, changes, message):
    shutil.copytree(mine, tmp_path / "copy")
    bring_code(tmp_path / "copy", **changes)
    with pytest.raises(ValueError, match=message):
        register_custom_code(Model(name=str(tmp_path / "copy"), trust_remote_code=True))


def test_code_of_a_tokenizer_is_never_run(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer_config.json"
    values = json.loads(file.read_text()) | {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    file.write_text(json.dumps(values))
    (tmp_path / "copy" / "mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="its tokenizer has code of its own, which is not run; save it as a fast"):
        read_tokenizer(str(tmp_path / "copy"), None, field="model.name")


def test_a_model_on_the_hub_needs_its_commit(monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    with pytest.raises(ValueError, match="is a model on the Hub, whose code may change"):
        code_of(Model(name="org/model", trust_remote_code=True))
    with pytest.raises(SpecError, match=r"names the commit 0123.*, but model\.revision is main"):
        RunSpec.model_validate({"model": {"name": "org/model", "revision": "main", "trust_remote_code": commit}})
    with pytest.raises(SpecError, match="is a preset and brings no code"):
        RunSpec.model_validate({"model": {"trust_remote_code": True}})
    # What the Hub is asked for: the code of that commit, and of no other.
    asked = []
    monkeypatch.setattr(custom_code, "cached_file", lambda *names, **options: asked.append((names, options)) or 1 / 0)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        register_custom_code(Model(name="org/model", revision=commit, trust_remote_code=commit))
    assert asked == [(("org/model", "config.json"), {"revision": commit})]
