"""A reward model as a reward: its scores are those of each text alone."""

import gc
import json
import shutil
import weakref

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.rewards.reward_function import Answers
from tasks.runtime.rewards.reward_model import RewardModel
from tasks.runtime.run_folder.folder import data_folder
from tests.runtime.helpers.pretrained_folder import save_pretrained

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, **SIZES)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_scores_are_those_of_each_text_alone(folder):
    prompts, completions = ["One", "Two and two", "Three"] * 4, [" yes" * n for n in range(1, 13)]
    answers = Answers(prompts, completions, [[1]] * 12, [{}] * 12, ["row"] * 12)
    made = RewardModel(RewardTerm(model=str(folder)), 0, torch.device("cpu"))
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = tokenizer(prompt + completion, return_tensors="pt")["input_ids"]
        if ids[0, -1] != tokenizer.eos_token_id:
            ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
        with torch.no_grad():
            expected.append(float(model(ids).logits))
    assert made.score(answers) == pytest.approx(expected, abs=1e-6)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_chats_are_scored_at_the_token_that_training_scores(folder, tmp_path):
    """Of a template that ends turns with a line break, as ChatML does, that is the line break, in transformers too."""
    shutil.copytree(folder, model := tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    prompt, texts = [{"role": "user", "content": "Two and two?"}], ["Four", "Five or so"]
    pairs = [{"prompt": prompt, **dict(zip(("chosen", "rejected"), ([answer(x)] for x in texts), strict=True))}] * 8
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    spec = RunSpec.model_validate(
        {
            "name": "reward",
            "output": str(tmp_path),
            "model": {"name": str(model)},
            "data": {"source": str(tmp_path / "pairs.jsonl"), "sequence_length": 64},
            "objective": {"type": "reward"},
        }
    )
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    row = prepare(recipe, data_folder(spec.output, recipe), report=print).train[0]
    net = LlamaForSequenceClassification.from_pretrained(model)
    expected = []
    with torch.no_grad():
        for side in (1, -1):
            ids = row["input_ids"][row["sides"] == side][None]
            hidden = net.model(ids).last_hidden_state
            expected.append(float(net.score(hidden)[0, row["scored"][row["sides"] == side].bool(), 0]))
            assert float(net(ids).logits) == pytest.approx(expected[-1], abs=1e-6)
    given = Answers([prompt] * 2, texts, [[1]] * 2, [{}] * 2, ["row"] * 2)
    found = RewardModel(RewardTerm(model=str(model)), 0, torch.device("cpu")).score(given)
    assert found == pytest.approx(expected, abs=1e-6)


def answer(text):
    return {"role": "assistant", "content": text}


def test_rewards_of_one_model_share_it_while_they_are_there(folder):
    """Those of training and of its validation."""
    term, device = RewardTerm(model=str(folder)), torch.device("cpu")
    one, two = RewardModel(term, 0, device), RewardModel(term, 1, device)
    assert one._model is two._model
    gone = weakref.ref(one._model)
    del one, two
    gc.collect()
    assert gone() is None


def test_a_model_without_one_score_is_refused(folder, tmp_path):
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES)).save_pretrained(tmp_path)
    LlamaForCausalLM(LlamaConfig(vocab_size=32, num_labels=1, **SIZES)).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "headless")
    for path, said in (
        (tmp_path, "a reward model has one"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "headless", r"1 tensors are missing \(score.weight\)"),
    ):
        with pytest.raises(ValueError, match=rf"objective.rewards\[3\].model.*{said}"):
            RewardModel(RewardTerm(model=str(path)), 3, torch.device("cpu"))


def test_a_tokenizer_without_an_end_token_is_refused(folder, tmp_path):
    LlamaForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"objective.rewards\[1\].model .* without an end token"):
        RewardModel(RewardTerm(model=str(tmp_path)), 1, torch.device("cpu"))


def test_padding_may_be_the_first_token(folder, tmp_path):
    """The config of a model without a padding token gets that of its tokenizer, also the one with number 0."""
    model = LlamaForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(tmp_path)
    made = RewardModel(RewardTerm(model=str(tmp_path)), 0, torch.device("cpu"))
    assert made._model.config.pad_token_id == 0 != tokenizer.eos_token_id


def test_a_score_that_is_no_number_names_the_row(folder, tmp_path):
    model = LlamaForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    made = RewardModel(RewardTerm(model=str(tmp_path)), 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"objective.rewards\[2\].model gives nan to rows:1, answer ' yes'"):
        made.score(Answers(["One"], [" yes"], [[1]], [{}], ["rows:1"]))
