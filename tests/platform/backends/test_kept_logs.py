"""Kept logs are read one by one, as far as their times allow, and one that is gone hides no other."""

from strata_platform import kept_log
from strata_platform.backends.kept_logs import KeptFiles, kept_lines


def content(pod, *seconds):
    return kept_log.header(pod, 0) + b"".join(kept_log.entry(float(second), 0, f"{pod} {second}") for second in seconds)


def test_a_log_is_read_once_the_lines_before_it_have_been_given():
    contents = {
        kept_log.file_name(seconds[0], pod): content(pod, *seconds)
        for pod, seconds in {"c": (30, 31), "a": (10, 14), "b": (12, 16)}.items()
    }
    read = []

    def open_one(name):
        read.append(name[17])
        return contents[name]

    found = [(line.text, "".join(read)) for line in KeptFiles("logs", list(contents), open_one).lines()]
    assert found == [
        ("a 10", "a"), ("b 12", "ab"), ("a 14", "ab"), ("b 16", "ab"), ("c 30", "abc"), ("c 31", "abc")
    ]  # fmt: skip


def test_a_log_that_is_removed_meanwhile_is_named_and_hides_no_other(tmp_path, caplog):
    logs = tmp_path / "bot" / "logs"
    logs.mkdir(parents=True)
    (logs / kept_log.file_name(10.0, "a")).write_bytes(content("a", 10))
    gone = kept_log.file_name(11.0, "b")
    (logs / gone).symlink_to("nowhere")
    for address in (str(tmp_path / "bot"), f"file://{tmp_path}/bot"):
        caplog.clear()
        assert [line.text for line in kept_lines(address, None)] == ["a 10"]
        assert f"the log {gone} of an earlier pod in {address}/logs cannot be read: FileNotFoundError" in caplog.text
