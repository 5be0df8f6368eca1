"""Small models from scratch that take audio, as folders that others would publish: weights, tokenizer and processor."""

from __future__ import annotations

import io
import json
import wave

import numpy as np

from tests.runtime.helpers.vision_models import saved, text_sizes, tokenizer_with


def qwen2_audio(folder, *, hidden=64, seconds=1, seed=0):
    """Qwen2-Audio, whose processor takes `seconds` of an audio; 25 tokens a second."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = tokenizer_with(names, "<|audio_bos|><|AUDIO|><|audio_eos|>\n")
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text_sizes(tokenizer, hidden)},
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 50 * seconds,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    return saved(folder, Qwen2AudioForConditionalGeneration, config, processor, seed)


def voxtral(folder, *, hidden=64, seed=0):
    """Voxtral, whose processor makes 375 tokens of every 30 seconds that begin."""
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor
    from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

    # Its processor knows the token of audio by its number, 24.
    others = [f"[{number}]" for number in range(3, 24)]
    tokenizer = tokenizer_with((*others, "[AUDIO]", "[BEGIN_AUDIO]"), "[BEGIN_AUDIO][AUDIO]")
    processor = VoxtralProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer)
    config = VoxtralConfig(
        text_config={"model_type": "llama", **text_sizes(tokenizer, hidden)},
        audio_config={
            "model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_mel_bins": 16, "max_source_positions": 1500,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
    )  # fmt: skip
    return saved(folder, VoxtralForConditionalGeneration, config, processor, seed)


FAMILIES = {family.__name__: family for family in (qwen2_audio, voxtral)}

NOTES = ("low", "middle", "high")
QUESTION = "How high is the tone?"


def tone(note, draw, seconds=0.3, rate=16_000):
    """The bytes of a WAV file, 16 bits: a tone of any loudness, length and phase. draw: a `random.Random`."""
    pitch = {"low": 300, "middle": 900, "high": 2700}[note] * draw.uniform(0.8, 1.25)
    places = np.arange(int(rate * seconds * draw.uniform(0.7, 1.3))) / rate
    sound = draw.uniform(0.2, 0.9) * np.sin(2 * np.pi * pitch * places + draw.uniform(0, 6))
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate)
        wav.writeframes((32767 * sound).astype("<i2").tobytes())
    return file.getvalue()


def samples_of(content):
    """What a WAV file of 16 bits holds, by the standard library."""
    with wave.open(io.BytesIO(content)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def write_tones(folder, rows, draw, *, name="train", rate=16_000):
    """Rows in `folder/name.jsonl` with WAV files beside it, in LLaMA-Factory's form."""
    found = []
    (folder / name).mkdir(parents=True)
    for number in range(rows):
        note = NOTES[number % len(NOTES)]
        path = f"{name}/{number}.wav"
        (folder / path).write_bytes(tone(note, draw, rate=rate))
        chat = [{"role": "user", "content": f"<audio>{QUESTION}"}, {"role": "assistant", "content": note}]
        found.append({"messages": chat, "audios": [path]})
    draw.shuffle(found)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return file
