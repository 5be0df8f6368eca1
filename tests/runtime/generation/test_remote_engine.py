"""Runs with a server of generation, beside runs that generate in their own process."""

import threading
from unittest import mock

import pytest

from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.generation.remote_engine import RemoteGenerator
from tasks.runtime.generation.served_engines import ServedEmbedded
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.objectives.grpo import Grpo
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tests.runtime.generation.test_embedded import DRAWN, build, requests
from tests.runtime.helpers.comparable_runs import file_of
from tests.runtime.helpers.generation_server import client, serving
from tests.runtime.helpers.train_forked import launch
from tests.runtime.test_policy_optimization import answers, losses, output, prepared, spec_of, train_spec  # noqa: F401


class Overlapping(ServedEmbedded):
    """Answers the requests of the second step only when the first one learns."""

    asked, learns = 0, threading.Event()

    def generate(self, wanted, sampling):
        Overlapping.asked += 1
        assert Overlapping.asked != 2 or self.learns.wait(60)
        return super().generate(wanted, sampling)


class TestRuns:
    def test_the_answers_of_the_next_step_are_generated_while_the_model_learns(self, output):  # noqa: F811
        """Those of the weights before the step, as without a server; and again when the run was killed."""
        changes = {
            "training": {"steps": 4, "micro_batch_size": 12},
            "evaluation": {"every": 3, "samples": 0},
            "data": {"validation_fraction": 0.3},
        }
        alone = spec_of(output, "ahead-alone", {"generate_ahead": True}, **changes)
        train_spec(alone)
        learn = Grpo.micro_batch_loss

        def learning(*arguments):
            Overlapping.learns.set()
            return learn(*arguments)

        with serving(Overlapping) as server, mock.patch.object(Grpo, "micro_batch_loss", learning):
            generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
            spec = spec_of(output, "ahead-served", {"generate_ahead": True, "generation": generation}, **changes)
            train_spec(spec)
            train_spec(spec, step=2)
        for found, expected in zip(losses(spec, 0)[:3], losses(alone)[:3], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert losses(spec, 1) == losses(spec, 0)[2:]
        # Step 3 follows a checkpoint, and step 4 an evaluation, which gives the server other weights.
        points = [point.metrics["staleness"] for point in read_points(RunFolder.of(spec).metrics)]
        assert points[:4] == [0, 1, 0, 0]

    def test_two_processes_take_their_answers_from_one_server_ahead(self, output):  # noqa: F811
        """No rank may send weights while another one's answers of those before are generated."""
        found = {}
        for processes, parallel in ((1, "single"), (2, "ddp")):
            with serving() as server:
                generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
                spec = spec_of(
                    output, f"ahead-{parallel}", {"generate_ahead": True, "generation": generation},
                    training={"steps": 4, "micro_batch_size": 12 // processes}, checkpoint={"every": 5},
                    topology={"nproc_per_node": processes}, parallel={"type": parallel},
                )  # fmt: skip
                if processes == 1:
                    train_spec(spec)
                else:
                    launch("2", file_of(output, spec))
            found[processes] = losses(spec)
            points = read_points(RunFolder.of(spec).metrics)
            assert [point.metrics["staleness"] for point in points] == [0, 1, 1, 1]
        for one, two in zip(found[1], found[2], strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-6)

    def test_a_server_that_is_gone_while_the_model_learns_costs_no_step(self, output, caplog):  # noqa: F811
        model = build()
        with serving() as server:
            made = client(model, server)
            made.update_weights()
        assert made.generate_while_training(requests(), DRAWN) is None
        assert "the next step generates its answers itself" in caplog.text
        training = {"training": {"steps": 2, "micro_batch_size": 12}}
        with serving() as server:
            generation = {"max_new_tokens": 12, "temperature": 0.9, "server": f"127.0.0.1:{server.server_port}"}
            at_once = spec_of(output, "at-once-served", {"generation": generation}, **training)
            train_spec(at_once)
        with (
            serving() as server,
            mock.patch.object(RemoteGenerator, "generate_while_training", lambda *_: None),
        ):
            generation["server"] = f"127.0.0.1:{server.server_port}"
            spec = spec_of(output, "gone-again", {"generate_ahead": True, "generation": generation}, **training)
            train_spec(spec)
        assert losses(spec) == losses(at_once)
        assert [point.metrics["staleness"] for point in read_points(RunFolder.of(spec).metrics)] == [0, 0]

    def test_a_run_learns_what_it_learns_without_a_server(self, output):  # noqa: F811
        """In training, in measurements of it, and when it was killed and continues."""
        common = {"importance_cap": 2.0}
        measured = {"data": {"validation_fraction": 0.3}, "evaluation": {"every": 2, "samples": 0}}
        generation = {"max_new_tokens": 12, "temperature": 0.9}
        alone = spec_of(output, "without-server", common, **measured)
        train_spec(alone)
        with serving() as server:
            served = {"generation": {**generation, "server": f"127.0.0.1:{server.server_port}"}}
            spec = spec_of(output, "with-server", common | served, **measured)
            record = train_spec(spec)
            train_spec(spec, step=2)
            weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
            after = evaluate(spec, record, prepared(spec), weights)
        assert answers(spec)[1] == answers(alone)[1]
        for found, expected in zip(losses(spec, 0), losses(alone), strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert losses(spec, 1) == losses(spec, 0)[2:]
        points = read_points(RunFolder.of(spec).metrics)
        assert all(point.metrics["generation_difference"] < 1e-5 for point in points)
        found, expected = (read_evaluations(RunFolder.of(one).metrics) for one in (spec, alone))
        assert [one.loss for one in found[:2]] == pytest.approx([one.loss for one in expected])
        assert after.eval_metrics["reward"] == pytest.approx(-found[1].loss)
