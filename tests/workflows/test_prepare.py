"""The task that names the data of a run."""

from types import SimpleNamespace

from strata_platform.spec import RunSpec
from tasks import prepare
from tasks.runtime.run_folder.folder import RunFolder


def test_another_execution_of_a_run_reads_the_commit_of_the_first(tmp_path, monkeypatch):
    first, newest = "a" * 40, "b" * 40
    # It would take the loggers from the tests that follow.
    monkeypatch.setattr(prepare, "configure_logging", lambda: None)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *names, revision: SimpleNamespace(sha=newest))
    spec = RunSpec.model_validate({"output": str(tmp_path), "data": {"source": "org/texts"}})
    assert prepare.plan(spec=spec).recipe.data.revision == newest
    folder = RunFolder.of(spec)
    folder.claim(spec)
    folder.write_data_commits([first])
    assert prepare.plan(spec=spec).recipe.data.revision == first
