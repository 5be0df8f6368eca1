"""What is old is named by the chart's CronJobs, which are a dry run here: other tests need what they would remove."""

from tests.e2e.helpers.cluster import NAMESPACE


def test_old_runs_and_finished_pods_are_named(cluster, undisturbed):
    undisturbed.wait()
    folder = f"{undisturbed.spec.output}/{undisturbed.spec.name}"
    # From the tenant's pod template, with its claim and its user.
    files = cluster.run_cron_job(NAMESPACE, "strata-retention-folders")
    assert f"would remove {folder}/checkpoints, " in files
    assert "No such file" not in cluster.window("ls", f"{folder}/checkpoints")
    objects = cluster.run_cron_job("strata-system", "strata-retention-objects")
    # Pods of a job go with the job.
    own = [pod for pod in undisturbed.pods() if not pod.metadata.labels.get("training.kubeflow.org/job-name")]
    pods = [pod.metadata.name for pod in own if pod.status.phase == "Succeeded"]
    assert pods and all(f"would remove pod {NAMESPACE}/{name}, " in objects for name in pods)
    assert f"would remove job {NAMESPACE}/{undisturbed.job()['metadata']['name']}, " in objects
    assert undisturbed.pods() and undisturbed.jobs()
