"""Export the trained model as a Hugging Face folder, read it back in another process, and publish it."""
