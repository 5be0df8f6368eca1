"""Small vision-language models from scratch, as folders that others would publish: weights, tokenizer and processor."""

from __future__ import annotations

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ("system user assistant: What shape is this? circle triangle cross",)
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
END = "<|im_end|>"


@cache
def _trained(special):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320 + len(special),
        special_tokens=["<|endoftext|>", "<|im_start|>", END, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 4, trainer)
    return bpe.to_str()


def tokenizer_with(special, image, **named):
    """A byte-level tokenizer with special tokens, and a template that writes `image` for an image."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(special)),
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        **named,
    )
    made.chat_template = CHATML.replace("IMAGE", image)
    return made


def qwen2_5_vl(folder, *, hidden=64, layers=2, depth=2, seed=0, edge=32):
    """A Qwen2.5-VL of patches of 4 pixels, four of which become a token."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = tokenizer_with(names, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(names))
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": edge**2}, **sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _sections(hidden // 8)},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": depth,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [depth - 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    return _saved(folder, Qwen2_5_VLForConditionalGeneration, config, processor, seed)


def _sections(half):
    """Dimensions of a rotary embedding for time, height and width: `half` in all."""
    rest = half // 3
    return [half - 2 * rest, rest, rest]


def _saved(folder, model_class, config, processor, seed):
    torch.manual_seed(seed)
    model = model_class(config)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


FAMILIES = {"qwen2_5_vl": qwen2_5_vl}
