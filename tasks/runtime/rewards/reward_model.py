"""A reward model as a reward: a model with one score, as `objective.type: reward` exports it."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.rewards.reward_function import Answers

# Answers in a forward pass.
_ROWS = 8
_in_use: WeakValueDictionary[tuple[str, torch.device], PreTrainedModel] = WeakValueDictionary()
"""By name and device, while a reward has it."""


class RewardModel:
    """Scores the text of prompt and answer. The model is frozen, and on the device of training.

    Raises:
        ValueError: the folder or Hub id holds no model with one score, or not all of its weights, or no tokenizer with
            an end token.
    """

    def __init__(self, term: RewardTerm, number: int, device: torch.device) -> None:
        assert term.model is not None
        require_reward_model(term, number)
        self._tokenizer = AutoTokenizer.from_pretrained(term.model, trust_remote_code=False)
        self._device, self._field = device, f"objective.rewards[{number}].model"
        try:
            self._model: Any = _frozen(term.model, device)
        except ValueError as error:
            raise ValueError(f"objective.rewards[{number}].model: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"objective.rewards[{number}].model {term.model!r} has a tokenizer without an end token, at which the "
                "score of a text is read; set its eos_token"
            )
        if self._model.config.pad_token_id is None:
            pad = self._tokenizer.pad_token_id
            self._model.config.pad_token_id = self._tokenizer.eos_token_id if pad is None else pad

    @torch.no_grad()
    def score(self, answers: Answers) -> list[float | None]:
        """The score of each answer.

        Raises ValueError for a score that is no finite number.
        """
        rows = [self._ids(prompt, text) for prompt, text in zip(answers.prompts, answers.completions, strict=True)]
        pad = self._model.config.pad_token_id
        found: list[float | None] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        for first in range(0, len(order), _ROWS):
            chosen = order[first : first + _ROWS]
            longest = len(rows[chosen[0]])
            ids = torch.tensor([rows[index] + [pad] * (longest - len(rows[index])) for index in chosen])
            mask = torch.tensor([[1] * len(rows[index]) + [0] * (longest - len(rows[index])) for index in chosen])
            scores = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits[:, 0]
            for index, score in zip(chosen, scores.float().tolist(), strict=True):
                if not math.isfinite(score):
                    raise ValueError(
                        f"{self._field} gives {score} to {answers.where[index]}, answer "
                        f"{answers.completions[index][:80]!r}; check its weights and its dtype"
                    )
                found[index] = score
        return found

    def _ids(self, prompt: Any, text: str) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt + text)["input_ids"]
            end = self._tokenizer.eos_token_id
            # As the texts of training end.
            return ids if ids[-1:] == [end] else [*ids, end]
        chat = [*prompt, {"role": "assistant", "content": text}]
        # Also as in training, with what a template writes after the last turn, such as a line break.
        rendered = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return list(self._tokenizer(str(rendered), add_special_tokens=False)["input_ids"])


def _frozen(name: str, device: torch.device) -> PreTrainedModel:
    """The model on the device: that of another reward in this process, such as validation's, if there is one."""
    found = _in_use.get((name, device))
    if found is None:
        loaded: Any = load_pretrained(name, head="score", seed=None, dtype="auto")
        found = _in_use[name, device] = loaded.to(device).eval().requires_grad_(False)
    return found


def require_reward_model(term: RewardTerm, number: int) -> None:
    """Raises ValueError if a term's model cannot be one. Reads no weights."""
    field = f"objective.rewards[{number}].model {term.model!r}"
    try:
        config = AutoConfig.from_pretrained(term.model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} cannot be read: {error}") from error
    if config.num_labels != 1:
        raise ValueError(
            f"{field} has {config.num_labels} scores for a text; a reward model has one, such as objective.type "
            "'reward' exports"
        )
