"""Small vision-language models from scratch, as folders that others would publish: weights, tokenizer and processor."""

from __future__ import annotations

from functools import cache

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PaliGemmaProcessor, PreTrainedTokenizerFast

TEXTS = ("system user assistant: What shape is this? circle triangle cross",)
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{% if part["type"] in ("image", "audio") %}PLACE{% else %}{{ part['text'] }}{% endif %}
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
    """A byte-level tokenizer with special tokens, and a template that writes `image` for an image.

    named: further special tokens by the names under which the family's processor looks for them.
    """
    special = (*special, *(token for token in named.values() if token not in special))
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(special)),
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    made.chat_template = CHATML.replace("PLACE", image)
    return made


def text_sizes(tokenizer, hidden=64, layers=2, **more):
    """The fields of a small text model."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | more


def _m_rope(hidden, **more):
    half = hidden // 8
    rest = half // 3
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * rest, rest, rest]} | more


QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen(folder, model, config_class, processor_class, video_class, vision, text=None, *, hidden, edge, seed, rope=()):
    """A model of Qwen's families of patches of 4 pixels, four of which become a token."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    tokenizer = tokenizer_with(QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(QWEN))
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor = processor_class(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": edge**2}, **sizes),
        tokenizer=tokenizer,
        video_processor=video_class(**sizes),
        chat_template=tokenizer.chat_template,
    )
    config = config_class(
        text_config=text_sizes(tokenizer, hidden, rope_parameters=_m_rope(hidden, **dict(rope)), **(text or {})),
        vision_config={
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2, **vision,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )  # fmt: skip
    return saved(folder, model, config, processor, seed)


def qwen2_vl(folder, *, hidden=64, edge=32, seed=0):
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    vision = {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2}
    classes = Qwen2VLForConditionalGeneration, Qwen2VLConfig, Qwen2VLProcessor, Qwen2VLVideoProcessor
    return _qwen(folder, *classes, vision, hidden=hidden, edge=edge, seed=seed)


def qwen2_5_vl(folder, *, hidden=64, edge=32, seed=0):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden, "window_size": 16,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    classes = Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
    return _qwen(folder, *classes, vision, hidden=hidden, edge=edge, seed=seed)


def _qwen3(folder, model, config, hidden, edge, seed, text=None):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    classes, rope = (model, config, Qwen3VLProcessor, Qwen3VLVideoProcessor), {"mrope_interleaved": True}
    return _qwen(folder, *classes, vision, text, hidden=hidden, edge=edge, seed=seed, rope=rope)


def qwen3_vl(folder, *, hidden=64, edge=32, seed=0):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    return _qwen3(folder, Qwen3VLForConditionalGeneration, Qwen3VLConfig, hidden, edge, seed)


def qwen3_vl_moe(folder, *, hidden=64, edge=32, seed=0):
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return _qwen3(folder, Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, hidden, edge, seed, experts)


def glm4v(folder, *, hidden=64, edge=32, seed=0):
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration
    from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    names = (
        "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"
    )  # fmt: skip
    tokenizer = tokenizer_with(names, "<|begin_of_image|><|image|><|end_of_image|>")
    ids = tokenizer.convert_tokens_to_ids(list(names))
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 2 * edge**2}
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=size, **sizes),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(size=size, **sizes),
        chat_template=tokenizer.chat_template,
    )
    config = Glm4vConfig(
        text_config=text_sizes(tokenizer, hidden, rope_parameters=_m_rope(hidden, partial_rotary_factor=1.0)),
        vision_config={
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2,
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden, "image_size": 32,
        },
        image_token_id=ids[2],
        video_token_id=ids[5],
        image_start_token_id=ids[0],
        image_end_token_id=ids[1],
        video_start_token_id=ids[3],
        video_end_token_id=ids[4],
        tie_word_embeddings=True,
    )  # fmt: skip
    return saved(folder, Glm4vForConditionalGeneration, config, processor, seed)


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}


def gemma3(folder, *, hidden=64, seed=0):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = tokenizer_with((), "<start_of_image>", **named)
    begin, end, image = tokenizer.convert_tokens_to_ids(list(named.values()))
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=16,
    )
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "query_pre_attn_scalar": 16}
    config = Gemma3Config(
        text_config=text_sizes(tokenizer, hidden, **kinds),
        vision_config={**TOWER, "image_size": 32},
        mm_tokens_per_image=16,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=image,
    )
    return saved(folder, Gemma3ForConditionalGeneration, config, processor, seed)


def llava(folder, *, hidden=64, seed=0):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.llava.image_processing_llava import LlavaImageProcessor
    from transformers.models.llava.processing_llava import LlavaProcessor

    tokenizer = tokenizer_with(("<image>",), "<image>\n")
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**text_sizes(tokenizer, hidden)),
        vision_config=CLIPVisionConfig(**TOWER, image_size=16, projection_dim=32),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    return saved(folder, LlavaForConditionalGeneration, config, processor, seed)


def llava_onevision(folder, *, hidden=64, seed=0):
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )
    from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

    names, grids = ("<image>", "<video>"), [[16, 16], [16, 32], [32, 16], [32, 32]]
    tokenizer = tokenizer_with(names, "<image>\n")
    image, video = tokenizer.convert_tokens_to_ids(list(names))
    size = {"height": 16, "width": 16}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    config = LlavaOnevisionConfig(
        text_config=Qwen2Config(**text_sizes(tokenizer, hidden)),
        vision_config=SiglipVisionConfig(**TOWER, image_size=16, vision_use_head=False),
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=grids,
    )
    return saved(folder, LlavaOnevisionForConditionalGeneration, config, processor, seed)


def idefics3(folder, *, hidden=64, seed=0):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
    from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tokenizer = _idefics_tokenizer()
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    config = Idefics3Config(
        text_config=LlamaConfig(**text_sizes(tokenizer, hidden)),
        vision_config={**TOWER, "image_size": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    return saved(folder, Idefics3ForConditionalGeneration, config, processor, seed)


def _idefics_tokenizer():
    places = (f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": END,
        "global_image_token": "<global-img>",
    }
    return tokenizer_with((*places, END), "<image>", **named)


def internvl(folder, *, hidden=64, seed=0):
    from transformers import InternVLConfig, InternVLForConditionalGeneration, Qwen2Config
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_with((), "<IMG_CONTEXT>\n", **named)
    size = {"height": 16, "width": 16}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, min_patches=1, max_patches=4),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    config = InternVLConfig(
        text_config=Qwen2Config(**text_sizes(tokenizer, hidden)),
        vision_config={**TOWER, "patch_size": [4, 4], "image_size": [16, 16]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return saved(folder, InternVLForConditionalGeneration, config, processor, seed)


PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _pixtral_processor(merge):
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokenizer, patch = tokenizer_with(PIXTRAL, "[IMG]"), {"height": 4, "width": 4}
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(patch_size={side: size * merge for side, size in patch.items()},
                                              size={"longest_edge": 32}),
        tokenizer=tokenizer,
        patch_size=4,
        spatial_merge_size=merge,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip


def pixtral(folder, *, hidden=64, seed=0):
    """Pixtral 12B is a LLaVA of Pixtral's tower."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, MistralConfig, PixtralVisionConfig

    processor = _pixtral_processor(1)
    config = LlavaConfig(
        text_config=MistralConfig(**text_sizes(processor.tokenizer, hidden)),
        vision_config=PixtralVisionConfig(**TOWER, image_size=32),
        image_token_index=processor.tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return saved(folder, LlavaForConditionalGeneration, config, processor, seed)


def mistral3(folder, *, hidden=64, seed=0):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    processor = _pixtral_processor(2)
    config = Mistral3Config(
        text_config=MistralConfig(**text_sizes(processor.tokenizer, hidden)),
        vision_config=PixtralVisionConfig(**TOWER, image_size=32),
        image_token_index=processor.tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    return saved(folder, Mistral3ForConditionalGeneration, config, processor, seed)


def gemma4(folder, *, hidden=64, seed=0):
    """Of the larger models, whose layers with a window see an image as a whole, with embeddings of each layer."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    names = ("boi", "eoi", "image", "boa", "eoa", "audio")
    tokenizer = tokenizer_with(("<|video|>",), "<|image|>", **{f"{name}_token": f"<|{name}|>" for name in names})
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in (*names, "video")}
    sizes = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = Gemma4Config(
        text_config=text_sizes(
            tokenizer, hidden, layer_types=["sliding_attention", "full_attention"], sliding_window=32,
            use_bidirectional_attention="vision", vocab_size_per_layer_input=len(tokenizer),
            hidden_size_per_layer_input=8, rope_parameters=rope, global_head_dim=hidden // 4,
        ),
        vision_config={
            **TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 2, "pooling_kernel_size": 3,
            "position_embedding_size": 64,
        },
        **{f"{name}_token_id": ids[name] for name in ("boi", "eoi", "image", "video", "boa", "audio")},
        eoa_token_index=ids["eoa"],
    )  # fmt: skip
    return saved(folder, Gemma4ForConditionalGeneration, config, processor, seed)


PALIGEMMA = """\
{%- for message in messages -%}
{%- if message['content'] is string -%}
{% if loop.first %}{{ bos_token }}{% endif %}{{ message['content'] }}
{%- else -%}
{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}
{%- if loop.first %}{{ bos_token }}{% endif %}
{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}
{%- endif -%}
{{ eos_token if message['role'] == 'assistant' else '\\n' }}
{%- endfor -%}
"""


def paligemma(folder, *, hidden=64, seed=0, text="gemma2"):
    """PaliGemma 2; of Gemma's text model with `text="gemma"`."""
    from transformers import AutoConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

    tokenizer = tokenizer_with(("<image>",), "<image>", image_token="<image>")
    tokenizer.bos_token = "<|im_start|>"
    images = SiglipImageProcessor(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    processor = PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=PALIGEMMA)
    tokenizer.chat_template = PALIGEMMA
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "query_pre_attn_scalar": 16}
    config = PaliGemmaConfig(
        text_config=AutoConfig.for_model(text, **text_sizes(tokenizer, hidden, **(kinds if text == "gemma2" else {}))),
        vision_config=SiglipVisionConfig(**TOWER, image_size=16, vision_use_head=False, projection_dim=hidden),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=hidden,
        hidden_size=hidden,
    )
    return saved(folder, PaliGemmaForConditionalGeneration, config, processor, seed)


def llama4(folder, *, hidden=64, seed=0):
    from transformers import Llama4Config, Llama4ForConditionalGeneration
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    names = ("image_start", "image_end", "image", "patch", "tile_x_separator", "tile_y_separator")
    tokenizer = tokenizer_with([f"<|{name}|>" for name in names], "<|image|>")
    begin, end, patch = tokenizer.convert_tokens_to_ids(["<|image_start|>", "<|image_end|>", "<|patch|>"])
    processor = Llama4Processor(
        image_processor=Llama4ImageProcessor(
            size={"height": 16, "width": 16}, max_patches=4, resize_to_max_canvas=False
        ),
        tokenizer=tokenizer,
        patch_size=4,
        chat_template=tokenizer.chat_template,
    )
    config = Llama4Config(
        text_config=text_sizes(
            tokenizer, hidden, intermediate_size_mlp=2 * hidden, num_local_experts=4, interleave_moe_layer_step=2,
            no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"], attention_chunk_size=32,
        ),
        vision_config={
            **TOWER, "image_size": 16, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
            "intermediate_size": 128,
        },
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=patch,
    )  # fmt: skip
    return saved(folder, Llama4ForConditionalGeneration, config, processor, seed)


def mllama(folder, *, hidden=64, seed=0):
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.image_processing_mllama import MllamaImageProcessor
    from transformers.models.mllama.image_processing_mllama import get_all_supported_aspect_ratios as shapes
    from transformers.models.mllama.processing_mllama import MllamaProcessor

    # The token of images is the last one: it is embedded, and not predicted.
    tokenizer = tokenizer_with(("<|python_tag|>",), "<|image|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    processor = MllamaProcessor(
        image_processor=MllamaImageProcessor(size={"height": 16, "width": 16}, max_image_tiles=4),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    sizes = text_sizes(tokenizer, hidden, layers=3, cross_attention_layers=[1], vocab_size=image, bos_token_id=1)
    config = MllamaConfig(
        text_config={**sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
            "intermediate_size": 64, "vision_output_dim": 64, "image_size": 16, "patch_size": 4, "max_num_tiles": 4,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [list(one) for one in shapes(4)],
        },
        image_token_index=image,
    )  # fmt: skip
    made = saved(folder, MllamaForConditionalGeneration, config, processor, seed)
    # Its gates begin at zero.
    weights = load_file(made / "model.safetensors")
    gates = {name: tensor + 0.5 for name, tensor in weights.items() if "gate" in name and tensor.numel() == 1}
    assert gates
    save_file(weights | gates, made / "model.safetensors", metadata={"format": "pt"})
    return made


def smolvlm(folder, *, hidden=64, seed=0):
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    tokenizer = _idefics_tokenizer()
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    config = SmolVLMConfig(
        text_config=LlamaConfig(**text_sizes(tokenizer, hidden)),
        vision_config={**TOWER, "image_size": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    return saved(folder, SmolVLMForConditionalGeneration, config, processor, seed)


def saved(folder, model_class, config, processor, seed):
    torch.manual_seed(seed)
    model = model_class(config)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def inputs_of(processor, images):
    """The output of the processor for a chat with one image, or for one with two of them in two turns."""
    if isinstance(processor, PaliGemmaProcessor):
        asked, answer = ("What shape is this?", "circle") if len(images) == 1 else ("And these?", "triangle, cross")
        inputs = processor(text="<image>" * len(images) + asked, images=images, suffix=answer, return_tensors="pt")
        del inputs["labels"]
        return inputs
    turns = (
        [("What shape is this?", "circle")] if len(images) == 1 else [("And this?", "triangle"), ("And this?", "cross")]
    )
    chat = []
    for asked, answer in turns:
        chat += [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    text = processor.apply_chat_template(chat)
    return processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)


FAMILIES = {
    family.__name__: family
    for family in (
        qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, glm4v, gemma3, llava, llava_onevision, idefics3, internvl,
        pixtral, mistral3, gemma4, paligemma, llama4, mllama, smolvlm,
    )
}  # fmt: skip
