"""Read the audio that rows name, checked and within limits.

An audio is kept as the bytes of its file, so that prepared data stays small and the model's processor hears what the
file holds. One that is cut is kept as WAV with 32-bit floats, which loses nothing more.

WAV is read here: PCM of 8 to 32 bits and floats. FLAC, MP3, Ogg and AIFF need the package soundfile.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil, gcd, inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from strata_platform.spec.sections.data import SHORTEST_AUDIO, Data
from tasks.runtime.data.media.kinds import AUDIO, MediaCounts
from tasks.runtime.data.media.media_files import content_of
from tasks.runtime.data.media.media_messages import describe_value
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

Samples = npt.NDArray[np.float32]

# Samples of all channels of an audio at most: 512 MiB as floats.
_MOST_SAMPLES = 1 << 27
# Samples that a good MP3 may lack: of one of its frames.
_MP3_FRAME = 1152
# A program that writes to a pipe does not know the size of what it writes, and gives one of these or more.
_UNKNOWN_SIZE = 0xFFFFFF00
_RATES = (1_000, 768_000)
# How a file of another format begins.
_BEGINNINGS = ((b"fLaC", "FLAC"), (b"OggS", "Ogg"), (b"ID3", "MP3"), (b"FORM", "AIFF"))
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# Of the resampler: zeros of the sinc on each side, the share of the band that passes, and the shape of Kaiser's window,
# which damps the rest by 90 dB.
_ZEROS, _PASS, _BETA = 32, 0.945, 9.0
# Values in the table of its filters: rates with a common divisor, such as 44,100 and 16,000, need few.
_TABLE = 1 << 23


@dataclass(frozen=True)
class Sound:
    """A decoded audio: samples [n], fp32, of all channels' mean, in -1 to 1; rate in Hz."""

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.samples.size / self.rate

    def size_at(self, rate: int) -> int:
        """The number of samples of `at(rate)`."""
        return -(-self.samples.size * rate // self.rate)

    def at(self, rate: int) -> Samples:
        """The samples at another rate; see `resample`."""
        return resample(self.samples, self.rate, rate)


class AudioReader:
    """Reads the audio of rows by the fields of `data`, and counts it.

    longest: seconds that the model's processor takes of an audio; it would drop the rest.
    rate: of the processor, in Hz.
    """

    def __init__(self, data: Data, counts: MediaCounts | None, *, rate: int, longest: float | None) -> None:
        self._data, self._rate = data, rate
        self.counts = counts or MediaCounts()
        self._most, self._limit = min(
            (data.audio_max_seconds or inf, "data.audio_max_seconds {:g}"),
            (longest or inf, "the {:g} that the model's processor takes"),
        )

    def read(self, value: object, row: Row) -> tuple[bytes, Sound]:
        """The bytes of an audio and its sound.

        Raises:
            RowError: the audio cannot be read, is damaged, or is shorter than 0.1 seconds.
            Skipped: it is shorter than `data.audio_min_seconds`, or longer than `data.audio_max_seconds` or than
                the model takes, and `data.overlong` is `skip`.
            ValueError: it is longer, and `data.overlong` is `error`; or its format needs a package.
        """
        content = content_of(value, AUDIO, row, self._data)
        where = f"{row.where}: audio {describe_value(value)}"
        try:
            sound = open_sound(content)
            _filters(sound.rate, self._rate)
        except MissingPackage as error:
            raise ValueError(f"{where} {error}") from error
        except ValueError as error:
            raise RowError(f"{where}: {error}") from error
        has = f"{where} has {sound.seconds:.4g} seconds"
        if (least := self._data.audio_min_seconds) is not None and sound.seconds < least:
            raise Skipped(f"{has}, fewer than data.audio_min_seconds {least:g}", "audio_length")
        if sound.seconds < SHORTEST_AUDIO:
            raise RowError(f"{has}, fewer than {SHORTEST_AUDIO} that a model needs")
        if sound.seconds > self._most:
            content, sound = self._cut(sound, f"{has}, more than {self._limit.format(self._most)}")
        self.counts.read += 1
        return content, sound

    def _cut(self, sound: Sound, too_long: str) -> tuple[bytes, Sound]:
        """The beginning of a sound that is too long, if `data.overlong` says so."""
        if self._data.overlong == "skip":
            raise Skipped(too_long, "audio_length")
        if self._data.overlong == "error":
            raise ValueError(f"{too_long}; shorten it, or set data.overlong to 'skip' or 'truncate'")
        self.counts.changed += 1
        cut = Sound(sound.samples[: int(self._most * sound.rate)], sound.rate)
        return wav_of(cut), cut


class MissingPackage(ValueError):
    """The format of an audio needs a package that is not installed."""


def open_sound(content: bytes) -> Sound:
    """The sound in the bytes of a file.

    Raises:
        ValueError: it is damaged, of another format, or of more than 134 million samples, in all channels.
        MissingPackage: it is of a format that soundfile reads, which is not installed.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        samples, rate = _read_wav(content)
    else:
        samples, rate = _read_other(content)
    if not _RATES[0] <= rate <= _RATES[1]:
        raise ValueError(f"a sample rate of {rate:,} Hz ({len(content):,} bytes)")
    if not np.isfinite(samples).all():
        raise ValueError(f"samples that are not numbers ({len(content):,} bytes)")
    return Sound(np.ascontiguousarray(samples.mean(axis=1), dtype=np.float32), rate)


def _read_wav(content: bytes) -> tuple[Samples, int]:
    """Samples [n, channels] and the rate of a WAV file."""
    form, at = None, 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        at, left = at + 8, len(content) - at - 8
        if name == b"fmt " and min(size, left) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content, at)
            if kind == _EXTENSIBLE and min(size, left) >= 26:
                (kind,) = struct.unpack_from("<H", content, at + 24)
            form = (kind, channels, rate, bits)
        if name == b"data":
            if form is None:
                raise ValueError("a WAV file with samples before their format")
            kind, channels, rate, bits = form
            _require_known(kind, channels, bits)
            known = size if size < _UNKNOWN_SIZE else left
            _require_few(known // (bits // 8 * channels), channels)
            if left < known:
                raise ValueError(f"a truncated WAV file: {left:,} of {size:,} bytes of samples")
            return _decoded(content[at : at + known], kind, channels, bits), rate
        at += size + size % 2
    raise ValueError(f"a WAV file without samples ({len(content):,} bytes)")


def _require_known(kind: int, channels: int, bits: int) -> None:
    if channels < 1 or (kind, bits) not in {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}:
        raise ValueError(f"a WAV file of format {kind} with {bits} bits and {channels} channels; give PCM or floats")


def _require_few(samples: int, channels: int) -> None:
    """Raise ValueError if a file promises more samples than are decoded: a small one may hold hours of silence."""
    if samples * channels > _MOST_SAMPLES:
        raise ValueError(
            f"{samples:,} samples of {channels} channels, more than {_MOST_SAMPLES:,} in all; cut it into pieces"
        )


def _decoded(body: bytes, kind: int, channels: int, bits: int) -> Samples:
    """Samples [n, channels] from the bytes of a WAV file."""
    body = body[: len(body) - len(body) % (bits // 8 * channels)]
    values: Samples
    if kind == _FLOAT:
        values = np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    elif bits == 8:
        values = (np.frombuffer(body, np.uint8) / 128 - 1).astype(np.float32)
    elif bits == 24:
        # As the upper three bytes of 32 bits.
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        values = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    else:
        values = (np.frombuffer(body, f"<i{bits // 8}") / 2 ** (bits - 1)).astype(np.float32)
    return values.reshape(-1, channels)


def _read_other(content: bytes) -> tuple[Samples, int]:
    """Samples [n, channels] and the rate of a file of another format."""
    known = next((name for begins, name in _BEGINNINGS if content.startswith(begins)), None)
    # A frame of MP3 begins with eleven bits that are 1.
    if known is None and len(content) > 1 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0:
        known = "MP3"
    if known is None:
        raise ValueError(f"not a known audio format: WAV, FLAC, MP3, Ogg or AIFF ({len(content):,} bytes)")
    if find_spec("soundfile") is None:
        raise MissingPackage(
            f"is {known}, which needs the package soundfile, which is not installed; install strata[{AUDIO.extra}], or "
            "give WAV"
        )
    _require_whole_form(content)
    soundfile: Any = import_module("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            _require_few(file.frames, file.channels)
            samples: Samples = file.read(dtype="float32", always_2d=True)
            # The decoder of MP3 stops without an error, that of Ogg finds no end.
            if len(samples) + _MP3_FRAME < file.frames or not len(samples):
                raise ValueError(f"a truncated {known} file: {len(samples):,} of {file.frames:,} samples")
            return samples, file.samplerate
    except soundfile.LibsndfileError as error:
        reason = error.error_string.removeprefix("Error : ").rstrip(".")
        raise ValueError(f"a corrupt {known} file: {reason} ({len(content):,} bytes)") from error


def _require_whole_form(content: bytes) -> None:
    """Raise ValueError for an AIFF file that ends early, of which libsndfile reads what there is."""
    if content[:4] == b"FORM" and len(content) >= 8:
        (size,) = struct.unpack_from(">I", content, 4)
        if len(content) - 8 < size < _UNKNOWN_SIZE:
            raise ValueError(f"a truncated AIFF file: {len(content):,} of {size + 8:,} bytes")


def wav_of(sound: Sound) -> bytes:
    """The sound as the bytes of a WAV file with 32-bit floats."""
    body = sound.samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", _FLOAT, 1, sound.rate, 4 * sound.rate, 4, 32)
    return b"".join((
        struct.pack("<4sI4s", b"RIFF", 4 + 8 + len(form) + 8 + len(body), b"WAVE"),
        struct.pack("<4sI", b"fmt ", len(form)), form, struct.pack("<4sI", b"data", len(body)), body,
    ))  # fmt: skip


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """Samples [n] at another rate: [ceil(n * wanted / rate)]. `torchaudio.functional.resample`, with a sharper filter.

    Each is a sum of those around it, weighted by a sinc that is cut by Kaiser's window; what the lower rate cannot hold
    is removed. Polyphase: a filter for each place of a new sample between the old ones.

    Raises ValueError for rates whose common divisor is so small that this takes a huge table.
    """
    if rate == wanted:
        return samples
    filters, begin, step = _filters(rate, wanted)
    count = -(-samples.size * wanted // rate)
    # The last filter reaches beyond the end.
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (begin, filters.shape[-1] + step))
    found = torch.nn.functional.conv1d(padded, filters, stride=step)
    return found[0].T.reshape(-1)[:count].contiguous().numpy()


@lru_cache(maxsize=8)
def _filters(rate: int, wanted: int) -> tuple[torch.Tensor, int, int]:
    """A filter for each phase, [phases, 1, taps]; where the first begins before its sample; and old samples from one
    round of phases to the next.
    """
    if rate == wanted:
        return torch.ones(1, 1, 1), 0, 1
    common = gcd(rate, wanted)
    phases, step = wanted // common, rate // common
    # In old samples: the band that passes is that of the lower rate.
    band = min(1.0, wanted / rate) * _PASS
    reach = ceil(_ZEROS / band)
    taps = 2 * reach + step
    if phases * taps > _TABLE:
        raise ValueError(
            f"a sample rate of {rate:,} Hz, which is not resampled to {wanted:,} Hz; give the audio at that rate, or "
            "at a usual one such as 22,050, 44,100 or 48,000"
        )
    places = np.arange(taps) - reach - np.arange(phases)[:, None] * (step / phases)
    window = np.i0(_BETA * np.sqrt(np.clip(1 - (places / reach) ** 2, 0, None))) / np.i0(_BETA)
    filters = band * np.sinc(band * places) * window * (np.abs(places) <= reach)
    return torch.from_numpy(filters.astype(np.float32))[:, None], reach, step
