"""SIGTERM stops a run wherever it is, and no worker outlives its agent."""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.runtime.process.signals import Preempted, defer_sigterm, raise_on_sigterm

ROOT = Path(__file__).parents[3]


def test_sigterm_raises_preempted_and_the_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="SIGTERM"), raise_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_library_can_swallow_it():
    with pytest.raises(Preempted), raise_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("an Exception handler caught it")


def test_second_sigterm_does_not_interrupt_the_clean_up():
    cleaned = []
    with pytest.raises(Preempted), raise_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)
    assert cleaned


def test_sigterm_can_be_noted_and_raised_later():
    with raise_on_sigterm():
        before = signal.getsignal(signal.SIGTERM)
        with defer_sigterm() as stop_request:
            assert not stop_request.received
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_request.received
        assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_nothing_changes():
    def enter():
        with raise_on_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = [signal.getsignal(signal.SIGTERM)]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers[0] == handlers[1]


WORKER = "from tasks.runtime.process.signals import *; die_with_agent(); print(os.getpid(), flush=True); signal.pause()"
AGENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"


def test_the_end_of_an_agent_is_the_end_of_its_workers():
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"},
    )  # fmt: skip
    worker = os.pidfd_open(int(agent.stdout.readline()))
    agent.kill()
    agent.communicate()
    assert select.select([worker], [], [], 30)[0]
    os.close(worker)


# As Flyte starts workers; this one takes its time before it asks the kernel.
LATE = """
import multiprocessing, signal
from tasks.runtime.process.signals import die_with_agent

def work():
    print("started", flush=True)
    multiprocessing.parent_process().join()
    die_with_agent()
    print("left behind", flush=True)

multiprocessing.get_context("fork").Process(target=work).start()
signal.pause()
"""


def test_nor_are_they_left_behind_that_had_not_begun():
    agent = subprocess.Popen(
        [sys.executable, "-c", LATE],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"},
    )  # fmt: skip
    assert agent.stdout.readline() == "started\n"
    agent.kill()
    # Until the worker has ended, too.
    assert agent.communicate()[0] == ""


# Stopped before it has been given a moment, most often.
STOPPED = """
import multiprocessing, signal, time
from tasks.runtime.process.signals import keep_sigterm_from_forks, raise_on_sigterm

keep_sigterm_from_forks()
ends = set()
with raise_on_sigterm():
    for _ in range(20):
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        fork.start()
        fork.terminate()
        fork.join(5)
        ends.add(fork.exitcode)
        fork.kill()
print(ends)
"""


def test_a_fork_that_is_stopped_when_it_begins_ends():
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout == "{-15}\n", ended.stderr
