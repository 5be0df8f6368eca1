import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, dump_spec, load_spec
from strata_platform.spec.reading.environment import replace_variables


def problem_of(text):
    with pytest.raises(SpecError) as caught:
        load_spec(text)
    (problem,) = caught.value.problems
    return problem


def test_texts_have_the_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("STEPS", "30")
    monkeypatch.delenv("BUCKET", raising=False)
    text = (
        "output: ${SCRATCH}/runs\ntraining: {steps: ${STEPS}}\ndata: {source: ['s3://${BUCKET:-a/b}/${STEPS}.json', c]}"
    )
    spec = load_spec(text.replace("${STEPS}}", "'${STEPS}'}"))
    assert (spec.output, spec.training.steps, spec.data.source) == ("/scratch/me/runs", 30, ("s3://a/b/30.json", "c"))


@pytest.mark.parametrize("value", ["", None])
def test_an_unset_or_empty_variable_is_told_with_its_field_and_line(monkeypatch, value):
    monkeypatch.delenv("SCRATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("SCRATCH", value)
    problem = problem_of("seed: 1\noutput: ${SCRATCH}/runs")
    assert (problem.path, problem.line) == ("output", 2)
    assert f"the environment variable SCRATCH is {'not set' if value is None else 'empty'}" in problem.message
    assert load_spec("output: ${SCRATCH:-}/runs").output == "/runs"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "db_password",
        "WANDB_API_KEY",
        "GITHUB_PAT",
        "KEY",
        "APITOKEN",
    ],
)
def test_secrets_do_not_get_into_a_spec(monkeypatch, name):
    monkeypatch.setenv(name, "value-of-the-secret")
    problem = problem_of(f"data: {{source: 'https://example.org/${{{name}}}/rows.jsonl'}}")
    assert problem.path == "data.source" and name in problem.message and "secret by its name" in problem.message
    assert "value-of-the-secret" not in str(problem)


@pytest.mark.parametrize("name", ["TOKENIZER", "MAX_TOKENS", "MONKEY", "PATH", "KEYBOARD", "COMPASS", "AUTHOR"])
def test_names_that_only_look_similar_are_no_secrets(name):
    assert replace_variables({"a": f"${{{name}}}"}, {name: "x"}) == ({"a": "x"}, [])


def test_a_url_whose_password_comes_from_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("LOGIN", "me:word")
    problem = problem_of("checkpoint: {url: 's3://${LOGIN}@bucket/path'}")
    assert "credentials" in problem.message and "word" not in str(problem)


@pytest.mark.parametrize("content", ["", "1A", "A B", "A-b", "A:?"])
def test_what_names_no_variable_is_refused(content):
    assert "names no environment variable" in problem_of(f"output: 'a${{{content}}}'").message


def test_a_dollar_and_a_brace_can_be_written_and_survive_storing(monkeypatch):
    monkeypatch.delenv("A", raising=False)
    spec = load_spec("data: {document_separator: '$${A} $A ${'}")
    assert spec.data.document_separator == "${A} $A ${"
    for format in ("yaml", "json"):
        assert load_spec(dump_spec(spec, format)) == spec
    assert load_spec(dump_spec(RunSpec(output="$${A}"))).output == "$${A}"


def test_aliases_are_visited_once():
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    with pytest.raises(SpecError, match="a29"):
        load_spec("\n".join(["a0: &a0 ['${HOME}']", *lists]))
