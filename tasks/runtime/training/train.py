"""Train a run: find its checkpoint, build and load the model, train, write the record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from strata_platform.runs import Stage
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora
from strata_platform.spec.sections.objectives import Grpo, generates
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import dtypes_of, load_model, load_optimizer, load_random_states, set_dtypes
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.data import PreparedData
from tasks.runtime.data.row_order import SEED_BITS, seed_bits_of
from tasks.runtime.evaluation.during_training import TrainingEvaluator
from tasks.runtime.extensions.callback_runner import CallbackRunner
from tasks.runtime.extensions.own_code import CODE, objective_code
from tasks.runtime.generation import start_engine
from tasks.runtime.metrics import startup
from tasks.runtime.metrics.mfu import build_mfu
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.metrics.recorder import Recorder
from tasks.runtime.metrics.trackers import serve_prometheus
from tasks.runtime.models.activations.activation_checkpointing import compile_layers
from tasks.runtime.models.adapters.adapter_folder import load_initial_adapter
from tasks.runtime.models.adapters.lora import add_adapter, base_fingerprint, require_base
from tasks.runtime.models.adapters.pissa import (
    INITIAL,
    InitialMatrices,
    principal_matrices,
    read_initial_matrices,
    set_initial_matrices,
)
from tasks.runtime.models.adapters.quantization import quantize_linear_layers
from tasks.runtime.models.build import (
    build_model,
    build_model_on_meta,
    build_saved_model,
    has_fused_loss,
    saved_dtype,
    set_special_tokens,
)
from tasks.runtime.models.config import compute_dtype
from tasks.runtime.models.float8 import keep_slow_layers, quantize_frozen_weights, saves_frozen_weights
from tasks.runtime.models.initial_weights import initial_weights
from tasks.runtime.models.trained_weights import AVERAGED_BY
from tasks.runtime.objectives import ObjectiveContext, build_validation_objective
from tasks.runtime.objectives.training_step import TrainingStep, build_training_step
from tasks.runtime.optim.gradient_sums import gradient_sums
from tasks.runtime.optim.lr_schedule import learning_rate_factor
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.parallel import build_strategy
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.rng import seed_generators
from tasks.runtime.process.signals import Preempted, StopRequest, defer_sigterm
from tasks.runtime.process.watchdog import Watchdog
from tasks.runtime.run_folder.metrics_file import seconds_trained
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.completion import device_name, write_record
from tasks.runtime.training.cuda_graphs import with_cuda_graphs
from tasks.runtime.training.early_stopping import EarlyStopping
from tasks.runtime.training.frameworks import load_framework
from tasks.runtime.training.job import Framework, Job
from tasks.runtime.training.resume_point import (
    PEAK_LR,
    find_resume_point,
    is_over,
    same_rank_layout,
    with_rate_of_begun_run,
)
from tasks.runtime.training.run_summary import log_sources, log_summary
from tasks.runtime.training.session import Session
from tasks.runtime.training.step_guard import StepGuard
from tasks.runtime.training.time_limit import TimeLimit

log = logging.getLogger(__name__)


def train(run: Session, data: PreparedData, framework: Framework | None = None) -> CompletionRecord:
    """Train to the spec's last step, or until early stopping, and return the record. Resumes from the newest complete
    checkpoint.

    Every process of the job calls it; rank 0 writes. A finished run is not trained again. `framework` replaces that of
    `runtime.framework`.

    Raises:
        ValueError: the data has fewer rows than one batch, the folder holds a run that must not continue, a check of
            `tasks.runtime.preflight` fails, or the loss is not finite.
        TimeLimitReached: `resources.time_limit` is used up before the last step.
    """
    steps = total_steps(run.spec, data.rows)
    # Raises before anything is loaded.
    learning_rate_factor(run.spec.schedule, steps)
    resume_from, finished = run.processes.on_main(lambda: find_resume_point(run, data, steps))
    if finished:
        if finished.stopped_early:
            report_progress(stopped_early=finished.steps)
            log.info("the run has stopped early already, at step %d of %d (%s)", finished.steps, steps, resume_from)
        else:
            log.info("all %d steps are done already (%s)", steps, resume_from)
        return finished
    over = run.processes.on_main(lambda: is_over(run, resume_from, steps))
    spent = run.processes.on_main(lambda: seconds_trained(run.folder.metrics))
    time_limit = TimeLimit(run.spec.resources.time_limit, spent, run.processes)
    if not over:
        # Before the model is loaded: the elastic agent starts the processes again after they end.
        time_limit.require_left("already")
    attempt = run.processes.on_main(lambda: _begin_attempt(run, data, continues=resume_from is not None))
    model, base, initial = _build_model(run, resume_from)
    set_special_tokens(model, data.tokenizer())
    step = build_training_step(model, run.spec, run.processes.device, data)
    log_summary(run, step, steps, data.rows, resume_from)
    log_sources(run, data, steps)
    report_progress(stage=Stage.TRAINING, steps=steps, attempt=attempt)
    # Counted now: some strategies leave parameters empty between passes.
    parameters = (model.num_parameters(), model.num_parameters(only_trainable=True))
    recorder = Recorder(
        run.spec,
        run.folder,
        run.processes,
        attempt,
        mfu=build_mfu(
            model,
            run.spec.data.sequence_length,
            compute_dtype(run.spec.model, run.spec.parallel),
            run.processes,
            device_name(run.processes),
        ),
        prometheus=serve_prometheus(run.spec, run.processes, run.training_warmup.to_dict),
    )
    callbacks = CallbackRunner(run.spec.runtime.callbacks if run.processes.is_main else ())
    trained = False
    with closing(recorder):
        # After a kill between the last checkpoint and the record, nothing is left to train.
        if not over:
            run.training_warmup.wait_until_loaded()
            job = build_job(
                run, data, step, base, recorder, callbacks, steps=steps, resume_from=resume_from,
                initial=initial, time_limit=time_limit,
            )  # fmt: skip
            stopping = defer_sigterm() if run.spec.checkpoint.on_sigterm == "save" else nullcontext(StopRequest())
            with closing(job.watchdog), closing(job.writer):
                with stopping as job.stop_request:
                    startup.mark("model")
                    job.run(framework or load_framework(run.spec.runtime.framework))
                    job.watchdog.expect("the end", math.inf)
                _stop_if_requested(run, job)
                job.writer.finish()
            callbacks.checkpoints_saved(job.writer.take_saved())
            trained = True
            run.training_warmup.close()
            recorder.note("warmup", run.training_warmup.to_dict())
        else:
            # The last checkpoint may not be in the store yet.
            run.processes.on_main(lambda: run.uploader.finish() if run.uploader is not None else None)
    # Each rank waits alone: in a collective, which has a time limit, the others would wait for the first one.
    data = data.completed()
    warmup = run.training_warmup.metadata()
    record = run.processes.on_main(
        lambda: write_record(run, data, parameters, step, steps, attempt, warmup, callbacks.code)
    )
    if trained:
        callbacks.train_end(record.model_dump(mode="json"))
    return record


def _begin_attempt(run: Session, data: PreparedData, *, continues: bool) -> int:
    """Check spec and data, and record the start in the run's folder. Returns the number of earlier starts.

    Runs on rank 0, which sends the result to the others.
    """
    run_checks("rank 0", "spec", "data", spec=run.spec, data=data)
    run.folder.write_data_commits(data.manifest.commits)
    if not continues:
        run.folder.write_initial_weights_ids(initial_weights(run.spec))
    return run.folder.begin_attempt()


def _stop_if_requested(run: Session, job: Job) -> None:
    """Raises `Preempted` on every rank if one received SIGTERM in the last step and uploads may be pending.

    Later, no rank checks the stop request, and an upload waits until the store can be reached.
    """
    if run.spec.checkpoint.url and not run.processes.all_true(not job.stop_request.received):
        log.info("received SIGTERM: the last step, %d, is done; its checkpoint may not be uploaded yet", job.newest)
        raise Preempted("SIGTERM")


def build_job(
    run: Session,
    data: PreparedData,
    step: TrainingStep,
    base: str,
    recorder: Recorder,
    callbacks: CallbackRunner,
    *,
    steps: int,
    resume_from: Path | None,
    initial: InitialMatrices | None = None,
    time_limit: TimeLimit | None = None,
) -> Job:
    """Shard the model, attach its optimizer, and load the checkpoint into both. A collective.

    `base`: fingerprint of the weights that the run started from, or trains an adapter in. `initial`: matrices of PiSSA
    that its checkpoints keep.
    """
    model, collate = step.model, step.collate
    sums = gradient_sums(model, run.spec.training, run.spec.parallel)
    objective = with_cuda_graphs(step, run.spec, run.processes, sums)
    set_dtypes(model, run.processes.on_main(lambda: dtypes_of(model)))
    metadata = checkpoint.metadata_of(resume_from) if resume_from else {}
    spec = with_rate_of_begun_run(run.spec, metadata)
    dtype = compute_dtype(run.spec.model, run.spec.parallel)
    float8 = keep_slow_layers(model, run.spec, run.processes, dtype, metadata)
    quantize_frozen_weights(model, run.spec, run.processes.device)
    compile_layers(model, run.spec.training)
    strategy = build_strategy(run.spec, run.processes)
    whole = strategy.whole_model(model) if generates(run.spec.objective) else None
    generator = None if whole is None else start_engine(run.spec, whole, data, run.processes)
    wrapped = strategy.wrap(model, weights_loaded_later=resume_from is not None and run.spec.adapter.type == "none")
    wrapped, optimizer = strategy.attach_optimizer(wrapped, build_optimizer(model, spec))
    if sums is not None:
        sums.attach(model.parameters())
    continues = resume_from is not None
    start = ObjectiveContext(
        run.spec, run.processes, data, strategy, wrapped, base, continues, metadata, collate,
        whole=whole, generator=generator, steps=steps,
    )  # fmt: skip
    data = objective.prepare(start)
    writer = CheckpointWriter(
        run.folder.checkpoints,
        model,
        optimizer,
        run.processes,
        keep_last=run.spec.checkpoint.keep_last,
        keep_every=run.spec.checkpoint.keep_every,
        uploader=run.uploader if run.processes.is_main else None,
        # One copy of each checkpoint's files is enough.
        constants={INITIAL + name: tensor for name, tensor in (initial or {}).items()} if run.processes.is_main else {},
        metadata={
            "spec_hash": run.spec.hash(),
            "data_hash": data.manifest.identities[0],
            "base": base,
            **({AVERAGED_BY: run.spec.optimizer.betas[0]} if run.spec.optimizer.type == "schedule_free" else {}),
            **float8,
            CODE: objective_code(run.spec.objective),
            SEED_BITS: seed_bits_of(metadata),
            PEAK_LR: spec.peak_lr,
            **objective.metadata(),
        },
    )
    watchdog = Watchdog(
        run.folder.hangs / f"attempt-{recorder.attempt}",
        run.processes.rank,
        run.processes.world_size,
        run.spec.faults.hang_timeout,
    )
    load = partial(_load, run, model, optimizer)
    evaluator = None
    if run.spec.evaluation.interval_field:
        evaluator = TrainingEvaluator(
            run.spec,
            run.processes,
            unwrapped=model,
            wrapped=wrapped,
            strategy=strategy,
            objective=build_validation_objective(
                run.spec, fused=has_fused_loss(step.patched), data=data, whole=whole, generator=generator
            ),
            data=data,
            collate=collate,
            varlen=step.varlen,
        )
    return Job(
        spec=spec,
        processes=run.processes,
        unwrapped_model=model,
        model=wrapped,
        strategy=strategy,
        objective=objective,
        optimizer=optimizer,
        data=data,
        collate=collate,
        start=checkpoint.step_of(resume_from) if resume_from else 0,
        steps=steps,
        recorder=recorder,
        writer=writer,
        watchdog=watchdog,
        guard=StepGuard(run.spec.faults, run.spec.nonfinite, run.processes, metadata),
        load=load,
        early_stopping=EarlyStopping(run.spec.evaluation, metadata),
        time_limit=time_limit or TimeLimit(None, 0.0, run.processes),
        evaluator=evaluator,
        step_ended=partial(_step_ended, run),
        callbacks=callbacks,
        gradient_sums=sums,
        set_random_states=load(resume_from),
        seed_bits=seed_bits_of(metadata),
    )


def _step_ended(run: Session) -> None:
    """Before a checkpoint of the step: another machine may have taken over."""
    run.require_folder()
    run.training_warmup.step_ended()


def _build_model(run: Session, resume_from: Path | None) -> tuple[PreTrainedModel, str, InitialMatrices]:
    """The model, the fingerprint of its initial weights, and the initial matrices of PiSSA. A collective.

    Rank 0 has the initial weights. The other ranks, and all ranks of a resumed run, have a meta model. An adapter's
    checkpoint has no base weights, so a resumed run reads those again.
    """
    spec = run.spec
    if spec.adapter.type == "none" and resume_from:
        return build_saved_model(resume_from, spec.model.attention), checkpoint.metadata_of(resume_from)["base"], {}
    dtype = saved_dtype(resume_from) if resume_from else None
    # Under FSDP, rank 0 broadcasts exact weights. Otherwise every rank reads its own: a 4-bit weight cannot be
    # broadcast without the scales that its layer keeps.
    packs = saves_frozen_weights(spec) or (spec.is_quantized and spec.parallel.type != "fsdp")
    reads = run.processes.is_main or packs
    model = build_model(spec.model, spec.seed, dtype=dtype) if reads else build_model_on_meta(spec.model, dtype=dtype)
    if model.can_generate():
        # Of config.json alone, a meta model has no end tokens of generation_config.json.
        model.generation_config = run.processes.on_main(lambda: model.generation_config)
    if not resume_from:
        # Checked before quantization: quantized layers do not run on the CPU.
        run.processes.on_main(lambda: run_checks("rank 0", "weights", spec=spec, model=model))
    with quantize_linear_layers(model, spec):
        add_adapter(model, spec.adapter, spec.seed)
    if not resume_from:
        # The strategy broadcasts it.
        run.processes.on_main(lambda: load_initial_adapter(model, spec.adapter, spec.model))
    base = run.processes.on_main(lambda: base_fingerprint(model))
    if resume_from:
        require_base(base, checkpoint.metadata_of(resume_from)["base"], spec.model.name)
    return model, base, _take_out_initial_matrices(run, model, resume_from)


def _take_out_initial_matrices(run: Session, model: PreTrainedModel, resume_from: Path | None) -> InitialMatrices:
    """Subtract the initial matrices of PiSSA from the weights of ranks that have some. A collective."""
    spec = run.spec
    if not isinstance(spec.adapter, Lora) or not spec.adapter.is_pissa:
        return {}
    settings = spec.adapter

    def find() -> InitialMatrices:
        if resume_from:
            return read_initial_matrices(Index(resume_from))
        return principal_matrices(model, settings, spec.seed, run.processes.device)

    initial = run.processes.on_main(find)
    set_initial_matrices(model, initial)
    return initial


def _load(
    run: Session, model: PreTrainedModel, optimizer: torch.optim.Optimizer, resume_from: Path | None
) -> Callable[[], None]:
    """Load the checkpoint, if there is one. Returns a function that sets the random states of the next step."""
    rank = run.processes.rank
    if resume_from is None:
        return lambda: seed_generators(run.spec.seed, run.processes.dp_cp_rank, 0)
    index = Index(resume_from)
    load_model(index, model)
    load_optimizer(index, model, optimizer)
    continued = same_rank_layout(checkpoint.metadata_of(resume_from), run.processes)

    def set_random_states() -> None:
        seed_generators(run.spec.seed, run.processes.dp_cp_rank, checkpoint.step_of(resume_from))
        if continued:
            load_random_states(index, rank)

    return set_random_states


def total_steps(spec: RunSpec, rows: int | None) -> int:
    """Optimizer steps of the run; `training.epochs` is converted by the number of rows, if that is known."""
    answers = spec.objective.group_size if isinstance(spec.objective, Grpo) else 1
    if rows is not None and rows * answers < spec.training.micro_batch_size * spec.dp_size:
        raise ValueError(
            f"the data has {rows} rows, fewer than one batch: training.micro_batch_size "
            f"{spec.training.micro_batch_size} x {spec.dp_size} processes that read rows; "
            "lower training.micro_batch_size or give more data"
        )
    if spec.epochs is None:
        assert spec.training.steps is not None
        return spec.training.steps
    assert rows is not None
    # As it is written: the float 0.1 is a little more than a tenth.
    return math.ceil(Fraction(str(spec.epochs)) * rows * spec.steps_per_row)
