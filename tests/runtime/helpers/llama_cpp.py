"""llama.cpp itself, where the package llama-cpp-py-sync is installed; tests that need it are skipped elsewhere.

Its library needs glibc 2.38. `LLAMA_CPP_LIB` names another library with the same functions, such as that of xllamacpp.
"""

import numpy as np
import pytest
import torch


class LlamaCpp:
    """A GGUF file, read by llama.cpp on one CPU core."""

    def __init__(self, file, context=512):
        package = pytest.importorskip(
            "llama_cpp_py_sync", reason="llama-cpp-py-sync is not installed", exc_type=ImportError
        )
        self.model = package.Llama(str(file), n_ctx=context, n_batch=context, n_threads=1, verbose=False)

    def tokens(self, text):
        """Tokens of a text, with those that begin a text; special tokens in it are control."""
        return self.model.tokenize(text, add_special=True, parse_special=True)

    def logits(self, ids, after=0):
        """Logits of each position of `ids`, which follow `after` tokens given before: [T, V], fp32."""
        lib, ffi, context = self.model._lib, self.model._ffi, self.model._ctx
        if not after:
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, after + place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert lib.llama_decode(context, batch) == 0
        rows = [lib.llama_get_logits_ith(context, place) for place in range(len(ids))]
        found = [np.frombuffer(ffi.buffer(row, 4 * self.model.n_vocab), np.float32).copy() for row in rows]
        lib.llama_batch_free(batch)
        return torch.from_numpy(np.stack(found))

    def greedy(self, ids, count):
        """The most likely tokens after `ids`, up to `count`, and to the one that ends a text."""
        made, logits = [], self.logits(ids)
        while len(made) < count:
            token = int(logits[-1].argmax())
            if self.model._lib.llama_vocab_is_eog(self.model._vocab, token):
                break
            made.append(token)
            logits = self.logits([token], after=len(ids) + len(made) - 1)
        return made
