"""The rewards that ship, on answers as models write them."""

import json
import time

import pytest

from tasks.runtime.rewards.functions import (
    SHIPPED,
    ColumnError,
    block_of,
    exact_match,
    json_schema,
    last_number,
    numeric,
    regex,
    text_of,
    unit_tests,
)


def message(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match_ignores_white_space_around_an_answer():
    answers = [" Paris\n", "paris", "Paris.", message("Paris"), "x"]
    right = ["Paris", "Paris", "Paris", "Paris", None]
    assert exact_match(answers, answer=right) == [1.0, 0.0, 0.0, 1.0, None]
    assert exact_match(answers[:2], column="city", ignore_case=True, city=right[:2]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 12.", 12.0),
        ("#### 1,234", 1234.0),
        (r"\boxed{-0.5}", -0.5),
        ("3 and .25", 0.25),
        ("2e3", 2000.0),
        ("1,2", 12.0),
        ("none", None),
        ("9" * 400, None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("13-10", 10), ("pages 3-5", 5), ("(x)-3", 3), ("x-3", 3), ("x = -3", -3), ("(-3)", -3), (r"\boxed{-3}", -3),
        ("Answer:-5", -5), ("\N{MINUS SIGN}3.5", -3.5), ("2e-3", 0.002),
    ],
)  # fmt: skip
def test_a_sign_belongs_to_a_number_where_nothing_stands_before_it(text, number):
    """A dash must not make a right answer wrong, nor a minus as mathematics writes it a wrong one right."""
    assert last_number(text) == number
    assert numeric([text], answer=[str(-number)]) == [0.0]


def test_numeric_compares_last_numbers():
    answers = ["2 + 2 = 4", "5", "no idea", message("It is 1,000.0"), "7"]
    right = [4, "4", 4, "He has 10. #### 1000", "not known"]
    assert numeric(answers, answer=right) == [1.0, 0.0, 0.0, 1.0, None]
    assert numeric(["3.14"], tolerance=0.01, answer=["3.1416"]) == [1.0]


def test_regex_takes_one_pattern_or_that_of_the_row():
    assert regex(["<a>\nx</a>", "x"], pattern="<a>.*</a>") == [1.0, 0.0]
    assert regex(["ab", "ab", "ab"], column="form", full=True, form=["a.", "a", None]) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="a pattern, or the column"):
        regex(["a"])


def test_json_schema_reads_a_fenced_block():
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    answers = ['{"n": 1}', 'Here:\n```json\n{"n": 2}\n```', '{"n": "1"}', "{n: 1}", "[" * 10**5]
    assert json_schema(answers, schema=schema) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert json_schema(answers[:2], column="form", form=[json.dumps(schema), None]) == [1.0, None]


def test_unit_tests_run_the_last_block():
    tests = "assert double(2) == 4"
    answers = [
        "First\n```python\nx = 1\n```\nthen\n```python\ndef double(n):\n    return 2 * n\n```",
        "def double(n):\n    return n",
        "def double(n:",
        message("double = lambda n: n + n"),
    ]
    assert unit_tests(answers, tests=[tests] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert unit_tests(["x"], tests=[None]) == [None]


def test_tests_may_be_a_list_of_statements():
    answers = ["def double(n):\n    return 2 * n", "def double(n):\n    return n"]
    tests = ["assert double(0) == 0", "assert double(2) == 4"]
    assert unit_tests(answers, column="test_list", test_list=[tests] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("nothing", [None, "", " \n", [], [""]])
def test_a_row_without_tests_has_no_value(nothing):
    assert unit_tests(["x = 1"], tests=[nothing]) == [None]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({"test": "assert f()"}, r"'tests' holds \{'test'.*takes Python as text, or a list of texts"),
        ([1], "takes Python as text"),
        ("def check(candidate):\n    assert candidate() == 1", r"any answer would pass; add a line .*`check\(NAME\)`"),
        ("N = {'a': 1}\nimport os\nclass T:\n    pass", "any answer would pass"),
        ("['assert f() == 1']", "any answer would pass"),
        ("assert f( == 1", "is not valid Python: .*correct the row"),
    ],
    ids=["object", "number", "definition", "constants", "list-as-text", "syntax"],
)
def test_tests_that_cannot_fail_are_refused(tests, said):
    with pytest.raises(ColumnError, match=said) as raised:
        unit_tests(["x", "x"], tests=["assert x", tests])
    assert raised.value.row == 1


def test_answers_without_a_turn_have_no_value(capsys):
    answers = ["import time\ntime.sleep(600)"] * 40
    assert unit_tests(answers, total_seconds=0.3, tests=["assert True"] * 40) == [None] * 40
    assert "unit_tests: 40 of 40 answers had no turn within 0.3 s" in capsys.readouterr().err


def test_json_that_python_cannot_compare_is_wrong():
    pytest.importorskip("jsonschema")
    nested = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    assert json_schema(["[" * 500 + "]" * 500, "[[]]"], schema=nested) == [0.0, 1.0]
    numbers = ["1e999", "9" * 4000, "1.5"]
    assert json_schema(numbers, schema={"type": "number", "multipleOf": 0.5}) == [0.0, 0.0, 1.0]


def test_an_expression_that_takes_for_ever_does_not_match(capsys):
    assert regex(["a" * 60, "aab"], pattern="(a+)+b") == [0.0, 1.0]
    assert "regex: 1 of 2 answers took more than 1 s and have 0" in capsys.readouterr().err


def test_blocks_are_found_in_linear_time():
    began = time.process_time()
    assert block_of("`" * 10**6) == "`" * 10**6
    assert time.process_time() - began < 5
    assert block_of("```\na\n```\n```py\nb\n```\n```c") == "b\n"


def test_the_text_of_contents_in_parts():
    assert text_of([{"content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}, {"content": None}]) == "ab"


def test_each_is_known_to_the_spec():
    from typing import get_args

    from strata_platform.spec.sections.objectives import RewardName

    assert {*get_args(RewardName)} == {*SHIPPED}
