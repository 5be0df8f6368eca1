"""The tokenizer of a run: loaded with the model, or trained on the data for a model from scratch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from strata_platform.file_io import require_regular_files
from strata_platform.spec import DataRecipe
from tasks.runtime.data.chat.template_source import NAMED_TEMPLATES, resolve_template
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.hub import asking_hub

log = logging.getLogger(__name__)

VOCABULARY_SIZE = 4096
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
TRAINED_TEMPLATE = "chatml"
"""Chat template of a trained tokenizer, unless `data.chat_template` names another."""
SPECIAL_TOKENS = (PAD, BOS, EOS, *NAMED_TEMPLATES[TRAINED_TEMPLATE])
# The merges converge long before this much text; more text would only take longer.
MAX_TRAINING_CHARACTERS = 50_000_000


def load_tokenizer(recipe: DataRecipe) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer from the Hub or a folder.

    A tokenizer without a padding token gets its end-of-sequence token as one: padding has no loss, and only padding
    attends to it.

    Raises:
        ValueError: it cannot be loaded, or has no end-of-sequence token.
    """
    name = recipe.tokenizer or recipe.model
    field = "model.tokenizer" if recipe.tokenizer else "model.name"
    # model.revision belongs to the model's repository, not to that of another tokenizer.
    revision = None if recipe.tokenizer else recipe.revision
    tokenizer = with_added_tokens(read_tokenizer(name, revision, field=field), recipe.add_special_tokens)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{field} {name!r}: its tokenizer has no end-of-sequence token, so the model could not learn to stop; set "
            "eos_token in the folder's tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def with_added_tokens(tokenizer: PreTrainedTokenizerBase, tokens: tuple[str, ...]) -> PreTrainedTokenizerBase:
    """Add `model.add_special_tokens` to the tokenizer and return it; tokens that it has already keep their numbers."""
    added = tokenizer.add_tokens(list(tokens), special_tokens=True)
    if added < len(tokens):
        log.info(
            "model.add_special_tokens: the tokenizer has %d of %d tokens already", len(tokens) - added, len(tokens)
        )
    return tokenizer


def read_tokenizer(name: str, revision: str | None, *, field: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from the Hub or a folder, unchanged.

    Raises ValueError, which names the spec's `field`, when it cannot be loaded, and Unreachable when the Hub does not
    answer.
    """
    try:
        require_regular_files(Path(name))
        with asking_hub(f"{field} {name!r}"):
            return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Unreachable:
        raise
    # Truncated files cause errors of any type.
    except Exception as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, (OSError, ValueError, ImportError)):
            reason = f"its files are truncated or not those of a tokenizer ({type(error).__name__}: {reason})"
        if "trust_remote_code" in reason:
            reason = "its tokenizer has code of its own, which is not run; save it as a fast tokenizer and name that"
            raise ValueError(f"{field} {name!r}: {reason} in model.tokenizer") from error
        raise ValueError(f"{field} {name!r}: cannot load its tokenizer: {reason}") from error


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 4096 tokens, which encodes any text without loss.

    Deterministic: the same texts in the same order give the same tokenizer. Uses the first 50 million characters.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, MAX_TRAINING_CHARACTERS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = resolve_template(TRAINED_TEMPLATE, fast)
    return fast


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer to a folder, for `AutoTokenizer.from_pretrained`."""
    tokenizer.save_pretrained(str(folder))


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)
