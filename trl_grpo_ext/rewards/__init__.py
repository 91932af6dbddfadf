"""Verifiable rewards: the runner that isolates them, the registry and the verifiers."""
