"""The attention of a model, and what keeps the sequences of a packed row apart, in recurrent layers too."""
