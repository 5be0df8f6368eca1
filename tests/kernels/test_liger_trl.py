"""TRL's trainers with `use_liger_kernel=True`, on the drop-in."""

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from strata_kernels.compat import liger
from tests.kernels.helpers.liger import build, fused

# TRL 1.16 deprecates the argument that is asked about here, and calls what transformers deprecates.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(64))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def words(first: int, n: int) -> str:
    return " ".join(f"w{(7 * first + j * j) % 64}" for j in range(n))


def losses(tmp_path, *, use_liger_kernel: bool) -> tuple[list[float], set[str]]:
    """The losses of five steps, and the kinds of modules that are fused."""
    rows = [{"text": words(i, 10 + i)} for i in range(8)]
    settings = SFTConfig(
        str(tmp_path), max_steps=5, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, max_length=32, gradient_checkpointing=False,
        use_liger_kernel=use_liger_kernel,
    )  # fmt: skip
    trainer = SFTTrainer(build(), settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return logged, fused(trainer.model)


@pytest.mark.usefixtures("liger_kernel")
def test_sft_trainer(tmp_path) -> None:
    expected, kinds = losses(tmp_path, use_liger_kernel=False)
    assert kinds == set() and len(expected) == 5 and expected[-1] < expected[0]
    got, kinds = losses(tmp_path, use_liger_kernel=True)
    # The trainer has a fused head of its own and asks for the layers alone.
    assert kinds == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    assert got == pytest.approx(expected, rel=1e-4)


def different_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


@pytest.mark.usefixtures("liger_kernel")
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trainers_of_preferences(tmp_path, kind) -> None:
    """Both build their reference model by themselves, from a folder."""
    build().save_pretrained(tmp_path / "model")
    pairs = {"prompt": words(1, 5), "chosen": f" {words(2, 6)}", "rejected": f" {words(4, 7)}"}
    config, trainer, options = {
        "dpo": (DPOConfig, DPOTrainer, {"max_length": 32}),
        "grpo": (GRPOConfig, GRPOTrainer, {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
    }[kind]
    further = {"reward_funcs": different_words} if kind == "grpo" else {}
    found = []
    for use_liger_kernel in (False, True):
        settings = config(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2,
            report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
            use_liger_kernel=use_liger_kernel, **options,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        run = trainer(
            model, args=settings, train_dataset=Dataset.from_list([pairs] * 4), processing_class=tokenizer(), **further
        )
        run.train()
        found.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert fused(run.model) == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    assert len(found[0]) == 3 and len(set(found[0])) > 1
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_without_the_drop_in(tmp_path) -> None:
    liger.uninstall()
    with pytest.raises(ImportError, match="liger"):
        losses(tmp_path, use_liger_kernel=True)
