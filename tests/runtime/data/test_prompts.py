"""Prompts: how rows of every form become tokens, what rewards get of them, and which answers a step asks for."""

import json

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.data.loader import training_loader
from tasks.runtime.data.prompts import known_of, prompts_of
from tasks.runtime.process.ranks import Processes

QUESTION = [{"role": "user", "content": "2 + 2?"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def make(folder, rows, *, data=None, **objective):
    """The spec and its prepared data."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = RunSpec.model_validate(
        {
            "output": str(folder),
            "data": {"source": f"{folder}/rows.jsonl", "sequence_length": 64, "validation_fraction": 0, **(data or {})},
            "objective": {
                "type": "grpo", "rewards": [{"function": "exact_match"}], "group_size": 2,
                "generation": {"max_new_tokens": 16}, **objective,
            },
            "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        }
    )  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return spec, prepare(recipe, folder / "data", report=print)


def test_a_text_is_the_prompt_as_it_is(tmp_path):
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n), "n": n} for n in range(4)]
    _, data = make(tmp_path, rows)
    tokenizer = data.tokenizer()
    found = prompts_of(collate([data.train[index] for index in range(4)]))
    texts = {tokenizer.decode(list(prompt.token_ids), skip_special_tokens=True): prompt for prompt in found}
    assert {*texts} == {row["prompt"] for row in rows}
    for line, row in enumerate(rows, start=1):
        known = texts[row["prompt"]].known
        assert known["prompt"] == row["prompt"] and known["columns"] == row
        assert known["where"].endswith(f"rows.jsonl:{line}") or str(line) in known["where"]
        # As texts begin, and without their end.
        assert list(texts[row["prompt"]].token_ids) == tokenizer(row["prompt"])["input_ids"]


@pytest.mark.parametrize(
    ("row", "messages", "data"),
    [
        ({"prompt": QUESTION}, QUESTION, {}),
        ({"messages": [SYSTEM, *QUESTION]}, [SYSTEM, *QUESTION], {}),
        ({"question": "2 + 2?", "answer": "4"}, QUESTION, {}),
        ({"prompt": "2 + 2?"}, QUESTION, {"format": "prompt_chat"}),
        ({"question": "2 + 2?", "system": "Be brief."}, [SYSTEM, *QUESTION], {}),
        (
            {"prompt": [{"speaker": "customer", "text": "2 + 2?"}]},
            QUESTION,
            {"message_keys": {"role": "speaker", "content": "text"}, "roles": {"user": "customer"}},
        ),
    ],
    ids=["prompt", "messages", "question", "text as a chat", "system", "mapped"],
)
def test_a_chat_ends_with_the_start_of_an_answer(tmp_path, row, messages, data):
    _, found = make(tmp_path, [row] * 2, data={"chat_template": "chatml", **data})
    tokenizer = found.tokenizer()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (prompt,) = prompts_of(collate([found.train[0]]))
    assert list(prompt.token_ids) == list(expected)
    assert prompt.known["prompt"] == messages


def test_a_prompt_without_room_for_an_answer_is_skipped_and_counted(tmp_path):
    _, data = make(tmp_path, [{"prompt": "a b"}, {"prompt": " ".join("wxyz"[n % 4] * (n % 5 + 1) for n in range(99))}])
    assert data.train[0]["input_ids"].numel() <= 48
    assert (len(data.train), data.manifest.skipped["overlong"]) == (1, 1)


def test_what_is_no_prompt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ends with the assistant's message"):
        make(
            tmp_path,
            [{"messages": [*QUESTION, {"role": "assistant", "content": "4"}]}],
            data={"chat_template": "chatml"},
        )
    with pytest.raises(ValueError, match="needs prompts, but the data has no column 'prompt', only 'text'"):
        make(tmp_path, [{"text": "a"}])


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_step_asks_for_groups_of_answers(tmp_path, iterations):
    """Whatever the number of processes; steps of the same answers read the same prompts."""
    spec, data = make(tmp_path, [{"prompt": f"{n} ="} for n in range(6)], num_iterations=iterations)

    def asked(processes, start=0):
        loader = training_loader(spec, data, processes, collate=collate, start=start, stop=4)
        return [(p.answer, known["prompt"]) for batch in loader for p in prompts_of(batch) for known in (p.known,)]

    whole = asked(Processes())
    assert [answer for answer, _ in whole[:4]] == [0, 1, 2, 3]
    # Both answers of a group are to the same prompt.
    assert all(whole[n][1] == whole[n + 1][1] for n in range(0, len(whole), 2))
    assert asked(Processes(), start=2) == whole[8:]
    if iterations == 2:
        assert whole[:4] == whole[4:8] and whole[8][0] == 4
    else:
        # Three steps are an epoch of prompts.
        assert {prompt for _, prompt in whole[:12]} == {f"{n} =" for n in range(6)} and whole[12][0] == 12


def test_columns_survive_shards(tmp_path):
    rows = [{"prompt": f"{n}", "answer": "x" * n} for n in range(1, 30)]
    _, data = make(tmp_path, rows)
    found = [known_of(data.train[index])["columns"] for index in range(len(data.train))]
    assert sorted(found, key=lambda row: len(row["answer"])) == rows
