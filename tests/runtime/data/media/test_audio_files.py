"""Audio of rows: what is read, how it gets to the processor's rate, and what is refused with its row."""

import io
import struct
import wave

import numpy as np
import pytest
import soundfile

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.media import audio_files
from tasks.runtime.data.media.audio_files import AudioReader, Sound, open_sound, resample, wav_of
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

ROW = Row("rows.jsonl line 7", {}, folder="")


def sine(pitch, rate, seconds=1.0):
    return np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)


def pcm(sound, rate=8000, width=2, channels=1):
    """A file as the standard library writes it."""
    scaled = np.round(sound * (2 ** (8 * width - 1) - 1)).astype("<i8")
    body = (scaled + 128).astype(np.uint8) if width == 1 else scaled.view(np.uint8).reshape(-1, 8)[:, :width]
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(body.tobytes())
    return file.getvalue()


def reader(longest=None, rate=16_000, **fields):
    return AudioReader(Data(source="rows.jsonl", **fields), None, rate=rate, longest=longest)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_the_standard_library_is_read(width):
    sound = 0.5 * sine(440, 8000)
    found = open_sound(pcm(sound, width=width))
    assert (found.rate, found.samples.dtype) == (8000, np.float32)
    np.testing.assert_allclose(found.samples, sound, atol=2.0 ** (2 - 8 * width))


def test_floats_extensible_headers_other_chunks_and_a_size_that_was_not_known_are_read():
    sound = (0.5 * sine(440, 8000)).astype(np.float32)
    plain = wav_of(Sound(sound, 8000))
    np.testing.assert_array_equal(open_sound(plain).samples, sound)
    # As ffmpeg writes to a pipe: its name and an odd number of bytes before, and no size.
    listed = plain[:12] + struct.pack("<4sI4s", b"LIST", 3, b"abc\0") + plain[12:]
    piped = listed.replace(struct.pack("<4sI", b"data", sound.nbytes), b"data\xff\xff\xff\xff")
    np.testing.assert_array_equal(open_sound(piped).samples, sound)
    form = struct.pack("<HHIIHH", 0xFFFE, 1, 8000, 32000, 4, 32) + struct.pack("<HHIH14s", 22, 32, 4, 3, bytes(14))
    body = struct.pack("<4sI", b"fmt ", len(form)) + form + struct.pack("<4sI", b"data", sound.nbytes) + sound.tobytes()
    wide = struct.pack("<4sI4s", b"RIFF", 4 + len(body), b"WAVE") + body
    np.testing.assert_array_equal(open_sound(wide).samples, sound)


def test_channels_become_their_mean():
    left, right = 0.5 * sine(440, 8000), 0.25 * sine(880, 8000)
    found = open_sound(pcm(np.stack([left, right], axis=1).reshape(-1), channels=2))
    np.testing.assert_allclose(found.samples, (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000])
def test_another_rate_holds_the_same_sound(rate):
    """A tone stays that tone; one that the lower rate cannot hold does not come back as another."""
    for pitch in (100, 1000, 3000):
        found = resample(sine(pitch, rate).astype(np.float32), rate, 16_000)
        assert found.size == 16_000 == Sound(sine(pitch, rate), rate).size_at(16_000)
        assert np.abs(found - sine(pitch, 16_000))[500:-500].max() < 10 ** (-90 / 20)
    if rate > 20_000:
        assert np.abs(resample(sine(9000, rate).astype(np.float32), rate, 16_000)[500:-500]).max() < 10 ** (-90 / 20)


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", r"not a known audio format: WAV, FLAC, MP3, Ogg or AIFF \(0 bytes\)"),
        (b"\x89PNG....", "not a known audio format"),
        (pcm(sine(440, 8000))[:2000], "a truncated WAV file: 1,956 of 16,000 bytes of samples"),
        (pcm(sine(440, 8000))[:40], r"a WAV file without samples \(40 bytes\)"),
        (pcm(sine(440, 8000))[:20] + b"\x06\0" + pcm(sine(440, 8000))[22:], "format 6 with 16 bits and 1 channels"),
        (pcm(sine(440, 8000), rate=500), "a sample rate of 500 Hz"),
        (pcm(sine(440, 16_001), rate=16_001), "16,001 Hz, which is not resampled to 16,000 Hz"),
        (wav_of(Sound(np.full(8000, np.nan, np.float32), 8000)), "samples that are not numbers"),
        (pcm(sine(440, 8000, 0.05)), "has 0.05 seconds, fewer than 0.1 that a model needs"),
        (pcm(sine(440, 8000, 0)), "has 0 seconds"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_its_row(content, problem):
    with pytest.raises(RowError, match=problem) as caught:
        reader().read(content, ROW)
    assert str(caught.value).startswith("rows.jsonl line 7: audio ")


def test_a_format_that_needs_a_package_says_which(monkeypatch):
    monkeypatch.setattr(audio_files, "find_spec", lambda name: None)
    for content, name in ((b"fLaC\0\0", "FLAC"), (b"ID3\3", "MP3"), (b"\xff\xfb\x90", "MP3"), (b"OggS", "Ogg")):
        with pytest.raises(
            ValueError, match=f"line 7: audio bytes.* is {name}, which needs the package soundfile"
        ) as e:
            reader().read(content, ROW)
        # Not skipped as an invalid row.
        assert not isinstance(e.value, RowError)


@pytest.mark.parametrize(
    "kind, half",
    [
        ("FLAC", "a corrupt FLAC file: flac decoder lost sync"),
        ("MP3", "a truncated MP3 file: .* of 16,000 samples"),
        ("OGG", "a corrupt Ogg file: "),
        ("AIFF", "a truncated AIFF file: 16,027 of 32,054 bytes"),
    ],
)
def test_other_formats_are_read_by_soundfile_and_refused_where_they_end_early(kind, half):
    file, sound = io.BytesIO(), 0.5 * sine(440, 16_000)
    soundfile.write(file, sound, 16_000, format=kind)
    content = file.getvalue()
    _, found = reader().read(content, ROW)
    assert found.rate == found.samples.size == 16_000
    assert np.abs(found.samples[2000:14_000]).max() == pytest.approx(0.5, abs=0.05)
    for size, problem in ((len(content) // 2, half), (30, f"a (corrupt|truncated) {kind}")):
        with pytest.raises(RowError, match=f"(?i)line 7: audio bytes.*: {problem}"):
            reader().read(content[:size], ROW)


def test_more_samples_than_a_limit_are_refused_before_they_are_read():
    """A header that promises them is enough, in a WAV file too."""
    promised = pcm(sine(440, 8000)).replace(struct.pack("<4sI", b"data", 16_000), struct.pack("<4sI", b"data", 1 << 30))
    with pytest.raises(RowError, match="536,870,912 samples of 1 channels, more than 134,217,728 in all; cut it into"):
        reader().read(promised, ROW)
    stereo = pcm(sine(440, 8000), channels=2)
    promised = stereo.replace(struct.pack("<4sI", b"data", 16_000), struct.pack("<4sI", b"data", 3 << 27))
    with pytest.raises(RowError, match="100,663,296 samples of 2 channels, more than"):
        reader().read(promised, ROW)


@pytest.mark.parametrize("limits", [{"audio_max_seconds": 0.5}, {"longest": 0.5}], ids=["of the data", "of the model"])
def test_an_audio_that_is_too_long_is_skipped_or_cut_or_an_error(limits):
    """By `data.overlong`; what is cut holds the beginning, exactly."""
    content = pcm(sine(440, 8000))
    says = "data.audio_max_seconds 0.5" if "audio_max_seconds" in limits else "the 0.5 that the model's processor takes"
    with pytest.raises(Skipped, match=f"has 1 seconds, more than {says}") as skipped:
        reader(**limits).read(content, ROW)
    assert skipped.value.reason == "audio_length"
    with pytest.raises(ValueError, match=r"set data\.overlong to 'skip' or 'truncate'") as refused:
        reader(**limits, overlong="error").read(content, ROW)
    assert not isinstance(refused.value, RowError)
    cuts = reader(**limits, overlong="truncate")
    kept, sound = cuts.read(content, ROW)
    np.testing.assert_array_equal(sound.samples, open_sound(content).samples[:4000])
    np.testing.assert_array_equal(open_sound(kept).samples, sound.samples)
    short = pcm(sine(440, 8000, 0.5))
    assert cuts.read(short, ROW)[0] == short
    assert (cuts.counts.read, cuts.counts.changed) == (2, 1)


def test_a_short_audio_skips_its_row():
    with pytest.raises(Skipped, match=r"has 0.3 seconds, fewer than data.audio_min_seconds 0.31"):
        reader(audio_min_seconds=0.31).read(pcm(sine(440, 8000, 0.3)), ROW)
    reader(audio_min_seconds=0.3).read(pcm(sine(440, 8000, 0.3)), ROW)
