"""Which activations a layer keeps for its backward pass, where it keeps them, and which it computes again."""
