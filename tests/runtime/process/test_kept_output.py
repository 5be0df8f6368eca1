"""What a process prints goes to bounded files, without a process between, and never ends it."""

import os
import subprocess
import sys
import threading

from strata_platform import kept_log
from tasks.runtime.process import kept_output
from tasks.runtime.process.kept_output import LONGEST, VARIABLE, OutputFile, keep_output, note


def test_lines_of_all_threads_are_whole_and_bars_have_their_last_state(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    end = keep_output()
    print("begun", end=" ")
    other = threading.Thread(target=print, args=("of another thread",))
    other.start()
    other.join()
    print("ended")
    print("0 %\r50 %\r100 %", file=sys.stderr)
    print("[rank 3] a warning", "@strata {}", sep="\n")
    print("x" * (2 * LONGEST) + " https://me:word@host")
    print("x" * (LONGEST - 20) + " https://me:" + "word" * 20 + "@host")
    note("not printed")
    end()
    (file,) = tmp_path.iterdir()
    *short, long, cut, last = kept_log.parse("log", file.read_bytes())
    assert [line.text for line in short] == ["of another thread", "begun ended", "100 %", "a warning"]
    assert {line.rank for line in short} == {3} and last.text == "not printed"
    assert long.text == "x" * LONGEST + " ..." and "word" not in cut.text


def test_one_stream_under_both_names_is_kept_once_and_a_long_line_may_begin_with_spaces(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    end = keep_output()
    print("once")
    sys.stdout.write(" " * (LONGEST + 1) + "x\n")
    print("https://host/" + "x" * LONGEST)
    end()
    (file,) = tmp_path.iterdir()
    once, spaces, url = (line.text for line in kept_log.parse("log", file.read_bytes()))
    assert once == "once" and not spaces.strip(" .") and url == " ..."
    assert "write" not in vars(sys.stdout)


def test_a_stream_has_its_own_write_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append, raising=False)
    end = keep_output()
    print("kept", end="\n")
    end()
    print("later")
    assert written == ["kept", "\n", "later", "\n"]
    (file,) = tmp_path.iterdir()
    assert [line.text for line in kept_log.parse("log", file.read_bytes())] == ["kept"]


def test_each_process_keeps_so_much_and_a_fork_has_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_output, "SEGMENT_BYTES", 200)
    file = OutputFile(tmp_path, lambda: 0)
    for number in range(100):
        file.add(f"line {number}")
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == kept_output.SEGMENTS and all(path.stat().st_size <= 200 for path in paths)
    assert kept_log.parse("log", paths[-1].read_bytes())[-1].text == "line 99"
    file._pid = 1  # As in a fork.
    file.add("of the fork")
    (forked,) = set(tmp_path.iterdir()) - set(paths)
    assert forked.name.startswith(f"{os.getpid()}-") and forked.name.endswith("-000000.jsonl")
    assert kept_log.parse("log", forked.read_bytes())[-1].text == "of the fork"
    file.close()


def test_a_full_disk_is_named_once_and_the_process_goes_on(tmp_path):
    program = (
        "import resource, signal\nfrom tasks.runtime.process.kept_output import keep_output\n"
        "keep_output()\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "for number in range(9): print('line', number)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {VARIABLE: str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("line") == 9
    assert done.stderr.count("prints is not kept: [Errno 27] File too large") == 1


def test_without_a_folder_nothing_is_kept_and_one_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    keep_output()
    assert "write" not in vars(sys.stdout)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    keep_output()
    assert "what this process prints is not kept: [Errno 2]" in capsys.readouterr().err


def test_a_stream_that_cannot_be_kept_is_named_and_the_other_one_is_kept(tmp_path, monkeypatch, capsys):
    class Fixed:
        __slots__ = ()

        def write(self, text):
            return len(text)

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "stdout", Fixed())
    end = keep_output()
    print("kept", file=sys.stderr)
    end()
    assert "what this process prints to Fixed is not kept: " in capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    assert [line.text for line in kept_log.parse("log", path.read_bytes())][-1] == "kept"
