"""A tokenizer with a token per byte and per special token."""

from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer


def save_byte_tokenizer(folder, template=None):
    """Write it to a folder, with this chat template or with the built-in one. Returns the folder's path."""
    tokenizer = train_tokenizer([""])
    if template is not None:
        tokenizer.chat_template = template
    save_tokenizer(tokenizer, folder)
    return str(folder)
