"""From a recipe to a folder of tokenized, packed rows: tokenizing, packing, parts in several processes."""
