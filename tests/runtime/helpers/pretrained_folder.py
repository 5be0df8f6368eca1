"""A small model as others leave it: a folder with weights, configuration and tokenizer."""

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.models.build import build_model, set_special_tokens
from tasks.runtime.run_folder.folder import data_folder


def save_pretrained(folder, **changes):
    """Fill `folder` with two layers of the preset; `changes` are those of a spec."""
    spec = RunSpec.model_validate({"output": str(folder / "made"), "data": {"max_samples": 60}, **changes})
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    tokenizer = prepare(recipe, data_folder(spec.output, recipe), report=print).tokenizer()
    model = build_model(spec.model, spec.seed)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    set_special_tokens(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
