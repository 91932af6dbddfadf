"""Sampling completions: the engine protocol and the transformers engine."""
