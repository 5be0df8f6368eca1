"""Adapters learn alone, are saved alone, come back exactly, and are merged into the model that is exported."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import Lora, Model, NoAdapter
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import load_model
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.adapters import fused_adapters
from tasks.runtime.models.adapters.adapted_layers import adapts_embeddings
from tasks.runtime.models.adapters.lora import add_adapter, base_fingerprint, merge_adapter, require_adapter
from tasks.runtime.models.build import build_model, build_model_on_meta, patch_for_training
from tasks.runtime.models.trained_weights import build_trained_model, collect_weights
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.warmup.plan import plan_kernels
from tests.kernels.helpers.tiny_models import build_tiny
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("forked_readers")
STEPS, SAVED = 4, 2
TOKENS = torch.arange(5, 37)[None]
VARIANTS = {
    "LoRA": {"lora_dropout": 0.1, "target_modules": ["q_proj", "mlp.down_proj"], "use_rslora": True},
    "DoRA": {"use_dora": True},
    "LoRA-by-regex": {"target_modules": r"model\.layers\.1\..*_proj|(?!.*\.k_proj).*\.self_attn\..*_proj"},
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_pretrained(tmp_path_factory.mktemp("pretrained"))


def make_spec(pretrained, adapter=None, **changes):
    return RunSpec.model_validate(
        {
            "output": str(pretrained / "out"),
            "model": {"name": str(pretrained)},
            "adapter": {"type": "lora", "r": 4} | (adapter or {}),
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {"steps": STEPS, "micro_batch_size": 2},
            "optimizer": {"lr": 1e-2},
            "checkpoint": {"every": SAVED},
            "evaluation": {"samples": 1, "max_new_tokens": 4, "max_batches": 2},
            "tracking": {"report_to": []},
            **changes,
        }
    )


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def curve(spec):
    return [(point.loss, point.grad_norm) for point in read_points(RunFolder.of(spec).metrics)]


@pytest.fixture(scope="module", params=VARIANTS)
def run(request, pretrained):
    """A finished run of each kind: its spec, its record, its losses."""
    spec = make_spec(pretrained, VARIANTS[request.param], name=request.param.lower())
    return spec, train_spec(spec), curve(spec)


def test_checkpoints_hold_the_adapter_alone(run):
    names = list(Index(checkpoint.latest(RunFolder.of(run[0]).checkpoints)))
    assert any(name.startswith("optimizer.exp_avg.") for name in names)
    assert all("lora_" in name for name in names if not name.startswith("random."))


def test_the_record_tells_what_learned(run):
    spec, record, _ = run
    model = build_model(spec.model, spec.seed)
    add_adapter(model, spec.adapter, spec.seed)
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in learning)
    assert record.trainable_parameters == sum(model.get_parameter(name).numel() for name in learning)
    assert record.parameters == model.num_parameters() > 20 * record.trainable_parameters


def test_a_resumed_run_computes_the_same_bits(run):
    spec, _, expected = run
    assert train_spec(spec, SAVED).status == "complete"
    assert curve(spec) == expected
    assert len(expected) == STEPS


def test_the_exported_model_has_the_adapter_merged(run):
    spec, record, _ = run
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    assert {file.name for file in weights.iterdir()} == {"adapter.safetensors", "metrics.jsonl"}
    record = evaluate(spec, record, data_of(spec), weights)
    assert record.eval_loss_after < record.eval_loss_before
    folder = export(spec, record, data_of(spec), weights)
    exported = AutoModelForCausalLM.from_pretrained(folder.model)

    base = build_model(spec.model, spec.seed)
    before = base(TOKENS).logits
    add_adapter(base, spec.adapter, spec.seed)
    # To begin with it changes nothing, up to rounding in DoRA.
    torch.testing.assert_close(base(TOKENS).logits, before, rtol=1e-5, atol=1e-5)
    load_model(Index(checkpoint.latest(folder.checkpoints)), base)
    expected = base.eval()(TOKENS).logits
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(exported(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name, _ in exported.named_parameters())
    card = (folder.model / "README.md").read_text()
    assert f"{exported.num_parameters() / 1e6:,.1f} M parameters, fine-tuned from" in card
    assert f"by {spec.name[0].upper()}oRA of rank 4, merged" in card
    # Others get the model: where its run was is nothing to them.
    assert [file.name for file in folder.model.iterdir() if bytes(folder.root.parent.parent) in file.read_bytes()] == []


def test_an_adapter_is_not_continued_in_another_model(pretrained, tmp_path):
    model = shutil.copytree(pretrained, tmp_path / "model", ignore=shutil.ignore_patterns("made", "out"))
    spec = make_spec(model)
    record = train_spec(spec)
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    other = build_model(spec.model, spec.seed)
    other.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1
    other.save_pretrained(spec.model.name)
    with pytest.raises(ValueError, match=r"has other weights than when this run began"):
        train_spec(spec, SAVED)
    # As of a model on the Hub, whose commit alone is compared before it is loaded.
    folder = RunFolder.of(spec)
    folder.initial_weights.unlink()
    with pytest.raises(ValueError, match=r"has other weights than those that the adapter was trained with"):
        train_spec(spec)
    with pytest.raises(ValueError, match=r"model\.name .* pin a Hub model with model\.revision"):
        build_trained_model(spec, weights)


def test_an_adapter_is_continued_after_its_model_was_saved_in_another_form(pretrained, tmp_path):
    """A tied head that is in the file and equals the embeddings is no other weight."""
    model = shutil.copytree(pretrained, tmp_path / "model", ignore=shutil.ignore_patterns("made", "out"))
    weights = load_file(model / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    assert not head.keys() & weights.keys()
    save_file(weights | head, model / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(model)
    train_spec(spec)
    expected = curve(spec)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    train_spec(spec, SAVED)
    assert curve(spec) == expected


def test_a_model_is_recognized_in_every_dtype(pretrained):
    specs = [
        make_spec(pretrained, model={"name": str(pretrained), "dtype": dtype}) for dtype in ("float32", "bfloat16")
    ]
    models = [build_model(spec.model, spec.seed) for spec in specs]
    for model, spec in zip(models, specs, strict=True):
        add_adapter(model, spec.adapter, spec.seed)
    assert base_fingerprint(models[0]) == base_fingerprint(models[1])
    assert {parameter.dtype for parameter in models[1].parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_a_merge_rounds_once(pretrained, settings):
    """Against sums in fp64. PEFT's own merge differs in a quarter to a half of the weights."""
    spec = make_spec(pretrained, settings, model={"name": str(pretrained), "dtype": "bfloat16"})
    model = build_model(spec.model, spec.seed)
    adapted = add_adapter(model, spec.adapter, spec.seed)
    torch.manual_seed(3)
    expected = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.02)
            layers = module.base_layer, module.lora_A["default"], module.lora_B["default"]
            base, a, b = (layer.weight.double() for layer in layers)
            total = base + module.scaling["default"] * (b @ a)
            if settings.get("use_dora"):
                magnitude = module.lora_magnitude_vector["default"].weight.double()
                total *= (magnitude / total.norm(dim=1))[:, None]
            expected[f"{name}.weight"] = total.bfloat16()
    merged = dict(merge_adapter(adapted).named_parameters())
    assert {parameter.dtype for parameter in merged.values()} == {torch.bfloat16}
    differ = sum((merged[name] != weight).sum().item() for name, weight in expected.items())
    assert differ <= 1e-3 * sum(weight.numel() for weight in expected.values())


def test_a_merge_that_overflows_is_refused(pretrained):
    spec = make_spec(pretrained)
    adapted = add_adapter(model := build_model(spec.model, spec.seed), spec.adapter, spec.seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.fill_(1e20)
    with pytest.raises(ValueError, match=r"adapter: model\.layers\.0.* not finite with the adapter merged"):
        merge_adapter(adapted)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what get_peft_model calls
def test_an_adapter_is_no_model_to_start_from(pretrained, tmp_path):
    spec = make_spec(pretrained)
    get_peft_model(build_model(spec.model, spec.seed), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.name .* is an adapter, not a model; merge it"):
        build_model(Model(name=str(tmp_path)), 0)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what get_peft_model calls
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_an_adapter_computes_what_that_of_peft_does(pretrained, settings):
    """In training, with its dropout, and without; none of its settings is at PEFT's default."""
    settings = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.5, **settings}
    spec = make_spec(pretrained, settings)
    ours, theirs = (build_model(spec.model, spec.seed) for _ in range(2))
    add_adapter(ours, spec.adapter, spec.seed)
    get_peft_model(theirs, LoraConfig(target_modules="all-linear", **settings))
    torch.manual_seed(2)
    for name, parameter in ours.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    theirs.load_state_dict(ours.state_dict())
    outputs = []
    for training in (True, False):
        for model in (ours.train(training), theirs.train(training)):
            torch.manual_seed(3)
            outputs.append(model(TOKENS).logits.detach())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[2], outputs[3])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-2)


def test_norms_without_a_weight_run_fused_beside_an_adapter(tmp_path):
    build_tiny("nanochat").save_pretrained(tmp_path)
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path)}, "adapter": {"type": "lora", "r": 4}})
    losses = []
    for enabled in (False, "auto"):
        changed = spec.model_copy(update={"kernels": Kernels(enabled=enabled)})
        model = build_model(spec.model, 0)
        add_adapter(model, spec.adapter, 0)
        step = build_training_step(model, changed, torch.device("cpu"))
        batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(TOKENS.numel())[None]}
        losses.append(step.objective.micro_batch_loss(model, batch, torch.tensor(31)).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [("phimoe", "router"), ("llama4_text", "router"), ("falcon_h1", "out_proj"), ("jamba", "dt_proj")],
)
def test_layers_whose_result_is_no_linear_layers_get_no_adapter(model_type, left_out, caplog):
    """Routers give more than one tensor; of others, fast kernels and loops read the weight and pass the adapter by."""
    model = build_tiny(model_type)
    named = Lora(target_modules=[left_out])
    with pytest.raises(ValueError, match=f"'{left_out}' is not a linear layer of the model"):
        add_adapter(model, named, 0)
    with caplog.at_level("INFO"):
        add_adapter(model, Lora(r=4), 0)
    assert f"adapter: not added to {left_out}, " in caplog.text
    adapted = {path.removesuffix(".lora_A") for path, _ in model.named_modules() if path.endswith(".lora_A")}
    assert adapted and not any(path.endswith(left_out) for path in adapted)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("target", ["q_porj", "lm_head", "mlp", "proj"])
def test_a_layer_that_is_not_there_is_refused(pretrained, target):
    spec = make_spec(pretrained, {"target_modules": ["v_proj", target]})
    with pytest.raises(
        ValueError, match=rf"adapter\.target_modules: '{target}' is not a linear layer .* choose from q_proj, k_proj"
    ):
        add_adapter(build_model_on_meta(spec.model), spec.adapter, spec.seed)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize(
    ("family", "regex"),
    [
        ("llama", r".*_proj"),
        ("llama", r"model\.layers\.1\..*\.(q_proj|down_proj)"),
        ("llama", r"(?!.*\.mlp\.).*\.[qv]_proj|model\.embed_tokens"),
        ("gpt2", r"transformer\.h\.\d+\.attn\.c_attn"),
        ("jamba", r".*\.[qkvo]_proj"),
    ],
)
def test_a_regular_expression_selects_what_it_does_in_peft(family, regex):
    ours, theirs = build_tiny(family), build_tiny(family)
    add_adapter(ours, Lora(r=4, target_modules=regex), 0)
    theirs = get_peft_model(theirs, LoraConfig(r=4, lora_alpha=32, target_modules=regex)).base_model.model
    found, expected = (
        {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
        for model in (ours, theirs)
    )
    assert found == expected and found
    assert adapts_embeddings(build_tiny(family), Lora(target_modules=regex)) == any("embed" in name for name in found)


@pytest.mark.parametrize(
    ("regex", "said"),
    [
        (r"layers\.0\..*_proj", "matches no whole name of a module; let it match linear layers"),
        (r".*\.0\..*attn.*", r"also matches model.layers.0.self_attn, which cannot have an adapter; let it match"),
        (r".*(q_proj|lm_head)", "also matches lm_head, which cannot"),
        (r".*norm", "also matches model.layers.0.input_layernorm, model.layers.0.post_attention_layernorm, "),
        (r".*", r"'.*' also matches model, model.layers, model.layers.0, model.layers.0.self_attn, "),
    ],
)
def test_a_regular_expression_that_matches_nothing_or_too_much_is_refused_with_names(pretrained, regex, said):
    spec = make_spec(pretrained, {"target_modules": regex})
    with pytest.raises(ValueError, match=r"^adapter\.target_modules: the regular expression ") as error:
        require_adapter(spec)
    assert said in str(error.value)
    assert ", such as model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, " in str(error.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_empty_model_gets_the_same_adapter_without_memory(pretrained, variant):
    spec = make_spec(pretrained, VARIANTS[variant])
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "bfloat16"})})
    models = [build_model(spec.model, spec.seed), build_model_on_meta(spec.model)]
    for model in models:
        add_adapter(model, spec.adapter, spec.seed)
    shapes = [{name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in models[1].parameters())


@pytest.mark.parametrize(("recomputed", "passes"), [("none", 1), ("full", 2)])
def test_a_run_adds_residuals_with_its_adapters_also_in_recomputed_layers(pretrained, recomputed, passes, monkeypatch):
    seen, take = [], fused_adapters._take_residual

    def taken(*given):
        found = take(*given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(fused_adapters, "_take_residual", taken)
    spec = make_spec(pretrained, training={"steps": STEPS, "gradient_checkpointing": recomputed})
    model = build_model(spec.model, spec.seed)
    add_adapter(model, spec.adapter, spec.seed)
    step = build_training_step(model, spec, torch.device("cpu"))
    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(32)[None]}
    step.objective.micro_batch_loss(model.train(), batch, torch.tensor(31)).loss.backward()
    # Of attention's last product and of the MLP, in each of two layers.
    assert sum(seen) == 4 * passes


def test_under_the_kernels_only_the_adapter_gets_gradients(pretrained):
    spec = make_spec(pretrained)
    model = build_model(spec.model, spec.seed)
    add_adapter(model, spec.adapter, spec.seed)
    assert "linear_cross_entropy" in patch_for_training(model, spec.kernels).counts
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = build_optimizer(model, spec).param_groups
    assert sum(len(group["params"]) for group in groups) == len(trained)


def test_the_warm_up_plans_the_step_with_the_adapter(pretrained):
    with_adapter = make_spec(pretrained)
    without = with_adapter.model_copy(update={"adapter": NoAdapter()})
    # The gradients of the norms' weights are summed by a kernel of their own; here nobody asks for them.
    assert kernels(without) - kernels(with_adapter) == {"add_rows_kernel"}
    assert kernels(with_adapter) < kernels(without)
    in_bf16 = with_adapter.model_copy(update={"model": with_adapter.model.model_copy(update={"dtype": "bfloat16"})})
    without = without.model_copy(update={"model": in_bf16.model})
    added = {"add_low_rank_kernel", "adapted_gate_fwd_kernel", "adapted_gate_bwd_kernel"}
    assert kernels(in_bf16) - kernels(without) == added
    matched = in_bf16.model_copy(update={"adapter": Lora(r=4, target_modules=r".*_proj")})
    assert plan_kernels(matched) == plan_kernels(in_bf16)
    matched = in_bf16.model_copy(update={"adapter": Lora(r=4, target_modules=r".*\.1\..*o_proj")})
    assert kernels(in_bf16) - kernels(matched) == {"adapted_gate_fwd_kernel", "adapted_gate_bwd_kernel"}


def kernels(spec):
    return {item.name for item in plan_kernels(spec).specializations}
