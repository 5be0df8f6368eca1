"""Which files make a tokenizer. Apart from what reads them, which needs transformers."""

TOKENIZER_FILES = ("*.jinja", "*.model", "*.tiktoken", "added_tokens.json", "additional_chat_templates/*.jinja",
                   "merges.txt", "special_tokens_map.json", "tekken.json", "tokenizer*.json", "vocab.*")  # fmt: skip
"""Glob patterns of the files of a tokenizer."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a processor of images or audio."""
