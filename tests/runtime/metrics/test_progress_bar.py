"""At a terminal there is a bar below the log, whose lines stay whole; elsewhere there are only lines."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINES = ["before", "x" * 300, "[brackets] are :smile: text", "during", "after"]
SCRIPT = f"""
import logging, sys
from tasks.runtime.metrics.progress_bar import ProgressBar, has_terminal
from tasks.runtime.process.log import configure_logging
configure_logging()
log = logging.getLogger("tasks.test")
lines = {LINES!r}
log.info(lines[0])
bar = ProgressBar(2, 10) if has_terminal() else None
for line in lines[1:3]:
    log.info(line)
if bar:
    bar.rate(1234.0)
    bar._drawn = 0.0
    bar.step(3)
print(lines[3])
if bar:
    bar._drawn = 0.0
    bar.activity("evaluation 1/2")
    bar.close()
log.info(lines[4])
"""


def environment(**more):
    path = os.pathsep.join([str(ROOT), str(ROOT / "platform"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80", **more}


def written_to_a_terminal(**more):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment(**more))
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        # Linux says so when the last writer has closed a terminal.
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(timeout=600) == 0, written
    return written.decode().replace("\r\n", "\n")


def shown(written):
    """The lines that stay on a terminal that is wide enough for each of them."""
    screen, row, column = [""], 0, 0
    for code in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b\r\n]+|\r|\n", written):
        match code:
            case "\r":
                column = 0
            case "\n":
                row, column = row + 1, 0
                screen += [""] * (row == len(screen))
            case "\x1b[2K":
                screen[row] = ""
            case "\x1b[1A":
                row -= 1
            case str() if code.startswith("\x1b"):
                assert code.endswith("m"), code
            case _:
                screen[row] = screen[row][:column].ljust(column) + code + screen[row][column + len(code) :]
                column += len(code)
    return [line for line in screen if line]


def test_at_a_terminal_lines_of_the_log_stay_whole_above_the_bar():
    written = written_to_a_terminal()
    for text in ("training", "2/10", "3/10", "1,234 tok/s", "evaluation 1/2", "left"):
        assert text in written, written
    assert shown(written) == LINES
    # A process that is killed leaves a cursor.
    assert "\x1b[?25l" not in written


@pytest.mark.parametrize("why", [{"WORLD_SIZE": "2"}, {"TERM": "dumb"}])
def test_there_is_none_beside_other_processes_or_on_a_dumb_terminal(why):
    assert written_to_a_terminal(**why).split("\n") == [*LINES, ""]


def test_in_a_file_there_are_only_lines():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment(), timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n".join([*LINES, ""]), "")
