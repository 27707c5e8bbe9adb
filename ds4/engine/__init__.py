"""Model files, tokenizer, sampler, Engine and Session: the Python face of native/."""
