"""What `model.freeze` names keeps its bits; the rest trains as before, under every strategy, and comes back exactly."""

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.models.build import build_model
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, approx, curve, file_of, make_spec
from tests.runtime.helpers.media_specs import media_spec
from tests.runtime.helpers.pictures import write_shapes
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec
from tests.runtime.helpers.vision_models import gemma3, llava, qwen2_5_vl

pytestmark = pytest.mark.usefixtures("narrowed")

FREEZE = ["embed_tokens", "layers.0", "*norm"]
GROUPS = [{"match": "mlp", "lr": 1e-4, "weight_decay": 0.0}]


def changed(spec, **changes):
    values = spec.model_dump()
    for section, fields in changes.items():
        values[section] |= fields
    return RunSpec.model_validate(values)


def spec_of(output, name, framework, strategy, processes, **options):
    spec = make_spec(output, name, framework, strategy, processes, **options)
    return changed(spec, model={"freeze": FREEZE}, optimizer={"groups": GROUPS, "lr": 5e-3})


@pytest.fixture(scope="module")
def alone(output):
    """One process under the plain loop."""
    spec = spec_of(output, "alone", "torch", "single", 1)
    train_spec(spec)
    return spec, curve(spec)


def weights(spec):
    index = Index(checkpoint.latest(RunFolder.of(spec).checkpoints))
    found = {name: index.empty(name) for name in index if name.startswith("model.")}
    index.read(found)
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}, list(index)


def frozen(name):
    return "embed_tokens" in name or "layers.0." in name or "norm" in name


def test_frozen_weights_keep_their_bits_and_have_no_state(alone):
    spec, _ = alone
    found, names = weights(spec)
    before = build_model(spec.model, spec.seed).state_dict()
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in found if not frozen(name)} != set()
    stepped = {name.removeprefix("optimizer.exp_avg.") for name in names if name.startswith("optimizer.exp_avg.")}
    assert stepped == moved


def test_a_resumed_run_computes_the_same_bits(alone):
    spec, expected = alone
    train_spec(spec, SAVED)
    assert curve(spec) == expected
    assert len(expected) == STEPS


def test_frameworks_and_strategies_train_the_same(alone, output):
    shared = {"tensor_parallel": 2, "training": {"gradient_accumulation_steps": 4}}
    specs = [
        spec_of(output, "ddp", "lightning", "ddp", 2),
        spec_of(output, "fsdp", "hf", "fsdp", 2),
        spec_of(output, "tensor", "torch", "fsdp", 2, **shared),
        spec_of(output, "deepspeed", "torch", "deepspeed", 2, stage=3),
    ]
    launch(2, "--narrow", *(file_of(output, spec) for spec in specs))
    for spec in specs:
        assert curve(spec) == approx(alone[1]), spec.name
        assert all(torch.equal(weights(spec)[0][n], t) for n, t in weights(alone[0])[0].items() if frozen(n))


# A family, what its spec names, whether layers are recomputed, and the parts that learn then.
SEEING = {
    "projector and text": (
        llava, {"freeze": ["vision_tower"]}, "none", {"multi_modal_projector", "language_model", "lm_head"},
    ),
    "projector": (llava, {"trainable": ["multi_modal_projector"]}, "none", {"multi_modal_projector"}),
    "text": (qwen2_5_vl, {"freeze": ["visual"]}, "none", {"language_model"}),
    "projector inside of the tower, and text": (
        qwen2_5_vl, {"freeze": ["visual.patch_embed", "visual.blocks"]}, "none", {"merger", "language_model"},
    ),
    "projector, recomputed": (
        gemma3, {"trainable": ["multi_modal_projector"]}, "full", {"multi_modal_projector"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "named", "recomputed", "learning"), SEEING.values(), ids=SEEING)
def test_parts_of_a_model_that_sees_learn_by_name(family, named, recomputed, learning, tmp_path):
    family(tmp_path / "model", hidden=32)
    training = {"steps": 2, "micro_batch_size": 2, "gradient_checkpointing": recomputed}
    source = write_shapes(tmp_path, 8)
    plain = media_spec(tmp_path, "seeing", tmp_path / "model", source, training=training, data={"sequence_length": 64})
    spec = changed(plain, model=named, optimizer={"lr": 1e-2})
    before = build_model(spec.model, spec.seed).state_dict()
    train_spec(spec)
    found, names = weights(spec)
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in found if learning & set(name.split("."))}
    assert all(any(part in name.split(".") for name in moved) for part in learning)
    assert {name.removeprefix("optimizer.exp_avg.") for name in names if ".exp_avg." in name} == moved


@pytest.mark.parametrize("frozen_part", ["lm_head", "layers.0", "*norm"])
def test_gradients_under_the_kernels_are_those_of_plain_modules(frozen_part):
    """Operators that leave out the gradient of a frozen weight leave out no other."""
    tokens = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(0))

    def gradients(enabled):
        spec = RunSpec(model={"dtype": "float32", "freeze": [frozen_part]}, kernels={"enabled": enabled})
        step = build_training_step(build_model(spec.model, 0), spec, torch.device("cpu"))
        batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(32).expand(2, 32)}
        step.objective.micro_batch_loss(step.model, batch, torch.tensor(62)).loss.backward()
        return {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}

    fused, plain = gradients(True), gradients(False)
    assert fused.keys() == plain.keys() != set()
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"freeze": ["embed_token"]}, r"model\.freeze: 'embed_token' matches no .* did you mean 'embed_tokens'"),
        ({"trainable": ["layer.1"]}, r"model\.trainable: 'layer\.1' matches no .* did you mean 'layers'"),
        ({"freeze": ["*"]}, r"model\.freeze leaves no weight to train"),
    ],
)
def test_what_cannot_be_frozen_is_told(fields, said):
    spec = RunSpec(model=fields)
    with pytest.raises(ValueError, match=said):
        build_training_step(build_model(spec.model, 0), spec, torch.device("cpu"))


def test_the_reverse_names_what_is_trained(caplog):
    spec = RunSpec(model={"trainable": ["layers.1", "lm_head"]})
    with caplog.at_level("INFO", "tasks"):
        model = build_training_step(build_model(spec.model, 0), spec, torch.device("cpu")).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # The head is tied to the embedding.
    assert trained == {n for n, _ in model.named_parameters() if "layers.1." in n or "embed_tokens" in n}
    total = len(list(model.named_parameters()))
    assert f"model: {total - len(trained)} tensors with" in caplog.text
    assert "frozen together" not in caplog.text
