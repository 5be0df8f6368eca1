"""TRL's SFTTrainer with `use_liger_kernel=True`, on the drop-in."""

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from strata_kernels.compat import liger
from tests.kernels.helpers.liger import build, fused

# TRL 1.16 deprecates the argument that is asked about here, and calls what transformers deprecates.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(64))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def losses(tmp_path, *, use_liger_kernel: bool) -> tuple[list[float], set[str]]:
    """The losses of five steps, and the kinds of modules that are fused."""
    rows = [{"text": " ".join(f"w{(7 * i + j * j) % 64}" for j in range(10 + i))} for i in range(8)]
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


def test_without_the_drop_in(tmp_path) -> None:
    liger.uninstall()
    with pytest.raises(ImportError, match="liger"):
        losses(tmp_path, use_liger_kernel=True)
